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


def traced_main(out: Path, scenario: str, files: list[str]) -> int:
    """Run a scenario, and write the executed lines by file as JSON. Returns the exit code."""
    executed: dict[str, set[int]] = {file: set() for file in files}

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        lines = executed.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)

        def traced(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return traced

        return traced

    sys.argv = [sys.argv[0], scenario, "json"]
    sys.settrace(called)
    code = main()
    sys.settrace(None)
    out.write_text(json.dumps({file: sorted(lines) for file, lines in executed.items()}))
    return code


if __name__ == "__main__":
    sys.exit(traced_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
