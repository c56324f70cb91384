"""Threads that read and write pages in files in parallel to the engine."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from engine.offload.page_files import FileFault, PageFiles, SlotRead, SlotWrite
from engine.offload.page_records import PageRecord

READERS = 4

T = TypeVar("T")


class FileThreads:
    """One writer thread, which keeps the order of calls, and some reader threads. Owns the files.

    Args:
        tell: called from any of the threads when a job is done.
    """

    def __init__(self, files: PageFiles, tell: Callable[[], None]) -> None:
        self._files = files
        self._tell = tell
        self._writer = ThreadPoolExecutor(1, "write-pages")
        self._readers = ThreadPoolExecutor(READERS, "read-pages")

    @property
    def num_slots(self) -> int:
        return self._files.num_slots

    def found(self) -> Iterator[tuple[int, PageRecord]]:
        return self._files.found()

    def write(self, writes: Sequence[SlotWrite]) -> Future[list[FileFault | None]]:
        return self._submit(self._writer, lambda: self._files.write(writes))

    def read(self, reads: Sequence[SlotRead]) -> Future[list[FileFault | None]]:
        return self._submit(self._readers, lambda: self._files.read(reads))

    def erase(self, slots: Sequence[int]) -> None:
        """Erase slots after all earlier writes."""
        self._submit(self._writer, lambda: self._files.erase(slots))

    def clear(self) -> None:
        """Erase all slots after all earlier writes."""
        self._submit(self._writer, self._files.clear)

    def close(self) -> None:
        """Wait for running jobs and for queued writer jobs. Cancel queued reads."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._files.close()

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        future = threads.submit(work)
        future.add_done_callback(lambda _: self._tell())
        return future
