"""Files that are validated when they are read, and read again when they change.

At the start, an invalid file is a ConfigError. Later, the last valid content stays in use, so a
half-written or invalid file causes a warning instead of an outage.
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

AGAIN_S = 10.0  # seconds until invalid files that have not changed are read again

T = TypeVar("T")
_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """Files that are read together. For any thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        what: str,
        setting: str,
        again_s: float = AGAIN_S,
    ) -> None:
        """Read the files.

        Args:
            read: returns their content. Raises ConfigError if they are invalid.
            what: name of their content, such as "certificates", for messages.
            setting: name of the setting, such as "--server.tls", for messages.
            again_s: seconds between two attempts to read invalid files.
        Raises:
            ConfigError: from `read`.
        """
        self._paths = paths
        self._read = read
        self._what = what
        self._setting = setting
        self._lock = threading.Lock()
        self._useless: _Stamp | None = None
        self._again = 0.0
        self._again_s = again_s
        self._stamp = self._look()
        self._held = read()

    def current(self) -> T:
        """Return the content: the same object until the files change to other valid content.

        Cheap enough for every handshake.
        """
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp or (stamp == self._useless and time.monotonic() < self._again):
                return self._held
            try:
                self._held = self._read()
            except ConfigError as error:
                # They may become valid without a change, if this clock is behind the authority's.
                self._useless, self._again = stamp, time.monotonic() + self._again_s
                log.warning(f"reload of {self._what} failed %s", kv(reason=error))
            else:
                self._stamp = stamp
                log.info(f"{self._what} reloaded %s", kv(setting=self._setting))
            return self._held

    def _look(self) -> _Stamp:
        """Return a value that differs between versions of the files."""
        return tuple(_version(path) for path in self._paths)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
