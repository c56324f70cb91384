"""Becomes a program that ends with its parent: python leash.py PARENT_PID SIGNAL PROGRAM [ARG...]

A script of its own, because code between fork and exec is no place for Python, and because a
program that is still importing is to be on its leash already: PR_SET_PDEATHSIG outlives exec.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str], number: signal.Signals) -> list[str]:
    """What to start as a child of this thread for `command` to be sent a signal when the thread
    ends, however it does."""
    # Without site: this program is here for a moment only.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def follow_parent(parent: int, number: int) -> None:
    """Have this process sent a signal when the thread that has started it ends.

    Raises:
        SystemExit: the parent is dead already.
    """
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl
        raise SystemExit(1)


def main(parent: str, number: str, *program: str) -> None:
    """Replaces this process."""
    follow_parent(int(parent), int(number))
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
