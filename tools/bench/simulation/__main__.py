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
from pathlib import Path

from tools.bench.simulation import clocks, lines, planner, plans, predictions
from tools.bench.support.record import emit, table

PARTS = ("plans", "planner", "clocks", "predictions", "lines")
_CLOCKS = {
    "figure": "{figure}",
    "virtual": "{virtual:.2f}",
    "real": "{real:.2f}",
    "ratio": "{ratio:.3f}",
}


def main() -> None:
    options = _options()
    config = {**vars(options), "models": str(options.models)}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        directory = Path(made)
        if "plans" in options.parts:
            rows = list(plans.measure(options.verify, options.limit_s))
            plans.show(rows)
            emit("simulation plans", config, rows)
        if "planner" in options.parts:
            rows = list(planner.measure(directory))
            planner.show(rows)
            emit("simulation planner", config, rows)
        if "clocks" in options.parts:
            rows = asyncio.run(clocks.measure(directory))
            table(rows, _CLOCKS)
            emit("simulation clocks", config, rows)
        if "predictions" in options.parts:
            rows = asyncio.run(predictions.measure(directory, options.models, options.rounds))
            predictions.show(rows)
            emit("simulation predictions", config, rows)
        if "lines" in options.parts:
            rows = lines.measure(directory)
            lines.show(rows)
            emit("simulation lines", config, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.simulation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--verify", type=int, default=3, help="layouts of each plan to run (3)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each plan (300)")
    parser.add_argument("--rounds", type=int, default=5, help="of predictions (5)")
    models = Path(tempfile.gettempdir(), "baton-bench-models")
    parser.add_argument("--models", type=Path, default=models, help=f"kept models ({models})")
    return parser.parse_args()


if __name__ == "__main__":
    main()
