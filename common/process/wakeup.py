"""A descriptor with which one thread ends another's sleep."""

import contextlib
import os


class WakeUp:
    """Ends another thread's sleep.

    Any thread may call `wake`, even after the sleeper has ended. Therefore the descriptor is closed
    only when nothing refers to this object any more.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
