"""Processes that leave the namespaces of those that started them, as containers do."""

import ctypes
import os
import signal

_FLAGS = {"ipc": 0x08000000, "pid": 0x20000000}  # CLONE_NEWIPC, CLONE_NEWPID
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_PRIVATE = 0x00044000  # MS_REC | MS_PRIVATE
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_libc = ctypes.CDLL(None, use_errno=True)


def leave(namespace: str) -> None:
    """Returns in a process that shares that namespace ("ipc" or "pid") with no other; "": in this
    one, as it is. Raises OSError where that is not permitted."""
    if not namespace:
        return
    _done(_libc.unshare(_FLAGS[namespace] | (_NEW_MOUNTS if namespace == "pid" else 0)))
    if namespace == "pid":
        if child := os.fork():  # only children are in the new one
            os.waitpid(child, 0)
            os._exit(0)
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _done(_libc.mount(None, b"/", None, _PRIVATE, None))
        _done(_libc.mount(b"proc", b"/proc", b"proc", 0, None))


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
