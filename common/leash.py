"""Becomes a program that ends with its parent: python leash.py PARENT_PID PROGRAM ARGUMENT...

A script of its own, because code between fork and exec is no place for Python.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: str, *program: str) -> None:
    """Replaces this process; SIGTERM will follow the parent's death, however it dies."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it died before prctl
        raise SystemExit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
