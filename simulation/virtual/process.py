"""The command line of a run, which needs a process of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal


def command(file: Path, form: Literal["text", "json"]) -> list[str]:
    """Return the command that runs a scenario and prints its report."""
    return [sys.executable, "-m", "simulation.virtual", str(file), form]


def environment() -> Mapping[str, str]:
    """Return the environment of a run. Its hash seed is fixed, because the order of sets of
    addresses decides between equal candidates."""
    return {**os.environ, "PYTHONHASHSEED": "0"}
