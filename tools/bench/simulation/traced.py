"""Runs a scenario in virtual time and writes which lines of some files were executed.

    python -m tools.bench.simulation.traced OUT SCENARIO FILE ...

Imports nothing else of this repository before the clocks are replaced.
"""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from simulation.virtual.__main__ import main


def _trace(executed: dict[str, set[int]]) -> None:
    """Note the executed lines of these files from now on."""

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        if (lines := executed.get(frame.f_code.co_filename)) is None:
            return None

        def traced(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return traced

        return traced(frame, event, argument)

    sys.settrace(called)


if __name__ == "__main__":
    _, out, scenario, *files = sys.argv
    executed: dict[str, set[int]] = {file: set() for file in files}
    sys.argv[1:] = [scenario, "json"]
    _trace(executed)
    code = main()
    sys.settrace(None)
    Path(out).write_text(json.dumps({file: sorted(lines) for file, lines in executed.items()}))
    sys.exit(code)
