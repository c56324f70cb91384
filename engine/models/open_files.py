"""Files from which many tensors are read, each opened once."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

MOST_OPEN = 16  # shards: a model is read roughly in their order


class OpenFiles:
    """Files that stay open between reads. For any thread. Leaving the context closes them.

    Args:
        most: maximum of open files. Beyond it, the least recently read one is closed.
    """

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._close_beyond(0)

    def map(self, path: Path, offset: int, num_bytes: int) -> memoryview:
        """Return these bytes of the file, at least one, mapped copy-on-write.

        Exactly these bytes stay mapped until the last reference to them is gone.

        Raises:
            OSError: the file cannot be read.
        """
        page_start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset - page_start + num_bytes
        with self._opened(path) as descriptor:
            try:
                mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=page_start)
            except ValueError as error:
                raise OSError(f"{path} is truncated") from error
        return memoryview(mapped)[offset - page_start :]

    def ask_for(self, path: Path, offset: int, num_bytes: int) -> None:
        """Ask the system to read these bytes ahead.

        Raises:
            OSError: the file cannot be read, or its file system does not support such hints.
        """
        with self._opened(path) as descriptor:
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        """Yield the file's descriptor, which stays open until the context is left."""
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.move_to_end(path)
            try:
                yield self._descriptors[path]
            finally:
                self._close_beyond(self._most)

    def _close_beyond(self, most: int) -> None:
        while len(self._descriptors) > most:
            os.close(self._descriptors.popitem(last=False)[1])
