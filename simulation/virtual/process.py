"""The command line of a run, which needs a process of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

# Nodes use a few rows of large tables. The other rows take no memory if a table is a mapping of its
# own without huge pages.
_MEMORY = {"NUMPY_MADVISE_HUGEPAGE": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def command(
    file: Path, form: Literal["text", "json"], program: str = "simulation.virtual"
) -> list[str]:
    """Return the command that runs a scenario and prints its report.

    Args:
        program: module. The default one supports no planner.
    """
    return [sys.executable, "-m", program, str(file), form]


def environment() -> Mapping[str, str]:
    """Return the environment of a run.

    Its hash seed is fixed, because the order of sets of addresses decides between equal candidates.
    """
    return {**os.environ, **_MEMORY, "PYTHONHASHSEED": "0"}
