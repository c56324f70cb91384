"""What files hold, checked when they are read, and read anew when they change.

At the start anything wrong is a ConfigError. Later, what was good stays in use: files that are
half replaced, or replaced by nonsense, are a warning and not an outage.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from common.errors import ConfigError
from common.logs import kv

log = logging.getLogger(__name__)

AGAIN_S = 10.0  # until files that could not be used, and have not changed since, are tried again

T = TypeVar("T")
_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """Files that are read as one. Any thread may ask."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        what: str,
        knob: str,
        again_s: float = AGAIN_S,
    ) -> None:
        """
        Args:
            read: makes what the files hold; raises ConfigError if they are of no use.
            what: they hold, such as "certificates", and
            knob: what users call them, such as "--front.tls"; for messages.
            again_s: between two looks into files that are of no use.
        Raises:
            ConfigError: what `read` raises.
        """
        self._paths = paths
        self._read = read
        self._what = what
        self._knob = knob
        self._lock = threading.Lock()
        self._useless: _Stamp | None = None
        self._again = 0.0
        self._again_s = again_s
        self._stamp = self._look()
        self._held = read()

    def current(self) -> T:
        """The same object as long as the files have not changed for the better. Cheap enough to
        be asked before every handshake."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp or (stamp == self._useless and time.monotonic() < self._again):
                return self._held
            try:
                self._held = self._read()
            except ConfigError as error:
                # They may become good by themselves: a clock here is behind the authority's.
                self._useless, self._again = stamp, time.monotonic() + self._again_s
                log.warning(f"new {self._what} are not used %s", kv(because=error))
            else:
                self._stamp = stamp
                log.info(f"{self._what} were read anew %s", kv(knob=self._knob))
            return self._held

    def _look(self) -> _Stamp:
        """What tells versions of the files apart."""
        return tuple(_version(path) for path in self._paths)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
