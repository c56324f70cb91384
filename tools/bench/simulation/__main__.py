"""Compare simulations with each other, and with a real cluster.

    python -m tools.bench.simulation                    about half an hour
    python -m tools.bench.simulation --parts clocks     some parts of it

plans: the best layouts of ten loads by closed forms, against virtual time. planner: the planner
against fixed splits over a day that changes. clocks: one scenario in virtual time and on the real
clock. predictions: a real cluster on this machine's processors, against its prediction from
measured step times. lines: the share of shipped lines that runs in virtual time execute.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.bench.simulation import lines, planning, real_clusters
from tools.bench.support.record import emit, parsed, show

_Rows = list[dict[str, Any]]
# The measurement of each part, which writes files to a directory, and the function that prints its
# rows.
_PARTS: dict[str, tuple[Callable[[Any, Path], Iterable[Any]], Callable[[_Rows], None]]] = {
    "plans": (lambda _, made: planning.compare_plans(), planning.show_plans),
    "planner": (lambda _, made: planning.compare_splits(made), planning.show_splits),
    "clocks": (
        lambda _, made: asyncio.run(real_clusters.compare_clocks(made)),
        show,
    ),
    "predictions": (
        lambda options, made: asyncio.run(
            real_clusters.compare_predictions(made, options.models, options.rounds)
        ),
        real_clusters.show_predictions,
    ),
    "lines": (lambda _, made: lines.measure(made), lines.show_lines),
}


def main() -> None:
    options = parsed(
        "simulation",
        __doc__,
        ("--parts", _PARTS, "parts to run"),
        ("--rounds", 5, "rounds of predictions"),
        ("--models", Path(tempfile.gettempdir(), "baton-bench-models"), "kept models"),
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        for part in options.parts:
            measure, say_result = _PARTS[part]
            rows = list(measure(options, Path(made)))
            say_result(rows)
            emit(f"simulation {part}", vars(options), rows)


if __name__ == "__main__":
    main()
