"""Memory that processes share by name, and what of it nobody has any more."""

import contextlib
import os
from pathlib import Path

_NAMES = "/dev/shm"


def left_behind() -> set[str]:
    """Names that no process has mapped: who made one is gone, or has just made it. Other tests run
    beside this one, and their programs have names of their own."""
    names = set(os.listdir(_NAMES))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped = maps.read_text()
            names = {name for name in names if f"{_NAMES}/{name}" not in mapped}
    return names
