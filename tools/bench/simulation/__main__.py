"""Compare simulations with each other, and with a real cluster.

    python -m tools.bench.simulation                    about half an hour
    python -m tools.bench.simulation --parts clocks     some parts of it

plans: the best layouts of ten loads by closed forms, against virtual time. planner: the planner
against fixed splits over a day that changes. clocks: one scenario in virtual time and on the real
clock. predictions: a real cluster on this machine's processors, against its prediction from
measured step times. lines: the share of shipped lines that runs in virtual time execute.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.bench.simulation import clocks, lines, planner, plans, predictions
from tools.bench.support.record import emit

_Rows = list[dict[str, Any]]
# The measurement of each part, which writes files to a directory, and the function that prints its
# rows.
_PARTS: dict[str, tuple[Callable[[Any, Path], Iterable[Any]], Callable[[_Rows], None]]] = {
    "plans": (lambda options, _: plans.measure(options.verify, options.limit_s), plans.show),
    "planner": (lambda _, made: planner.measure(made), planner.show),
    "clocks": (lambda _, made: asyncio.run(clocks.measure(made)), clocks.show),
    "predictions": (
        lambda options, made: asyncio.run(
            predictions.measure(made, options.models, options.rounds)
        ),
        predictions.show,
    ),
    "lines": (lambda _, made: lines.measure(made), lines.show),
}


def main() -> None:
    options = _options()
    config = {**vars(options), "models": str(options.models)}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        for part in options.parts:
            measure, show = _PARTS[part]
            rows = list(measure(options, Path(made)))
            show(rows)
            emit(f"simulation {part}", config, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.simulation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--verify", type=int, default=3, help="layouts of each plan to run (3)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each plan (300)")
    parser.add_argument("--rounds", type=int, default=5, help="of predictions (5)")
    models = Path(tempfile.gettempdir(), "baton-bench-models")
    parser.add_argument("--models", type=Path, default=models, help=f"kept models ({models})")
    return parser.parse_args()


if __name__ == "__main__":
    main()
