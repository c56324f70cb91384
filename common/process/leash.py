"""Runs a program that ends with its parent: python leash.py PARENT_PID SIGNAL PROGRAM [ARG...]

A separate script, because Python code must not run between fork and exec, and because the signal
must be set before the program's imports. PR_SET_PDEATHSIG persists across exec.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str], number: signal.Signals) -> list[str]:
    """Return a command that runs `command` and gets a signal when the calling thread ends.

    The calling thread must start it.
    """
    # Without site, because this interpreter is replaced immediately.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def follow_parent(parent: int, number: int) -> None:
    """Make this process get a signal when the thread that started it ends.

    Raises:
        SystemExit: the parent has ended already.
    """
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before prctl
        raise SystemExit(1)


def main(parent: str, number: str, *program: str) -> None:
    """Replace this process by the program."""
    follow_parent(int(parent), int(number))
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
