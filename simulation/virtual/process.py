"""Command line and environment of a run, which needs its own process."""

import os
import sys
from collections.abc import Mapping
from typing import Literal

# Nodes use a few rows of large tables. The other rows take no memory if each table is a separate
# mapping without huge pages.
_MEMORY = {"NUMPY_MADVISE_HUGEPAGE": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def command(
    *what: str, form: Literal["text", "json"] = "json", program: str = "simulation.virtual"
) -> list[str]:
    """Return the command that runs scenarios and prints a report.

    Args:
        what: a file, or --chaos, the first seed and the number of seeds.
        program: module to run. The default one supports no planner.
    """
    return [sys.executable, "-m", program, *what, form]


def environment() -> Mapping[str, str]:
    """Return the environment of a run.

    The hash seed is fixed, because the order of sets of addresses decides between equal candidates.
    """
    return {**os.environ, **_MEMORY, "PYTHONHASHSEED": "0"}
