"""Page files of a node with several ranks. Each rank has its own files, with the same slots.

Rank 0 knows the slot of each page. If a node ends during a write, a rank may lack a page. A read
therefore names the record that it expects. A rank with another record reports a damaged page.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from xxhash import xxh3_64_intdigest

from common.errors import ConfigError, EngineFault
from engine.offload.page_files import (
    FileFault,
    FileThreads,
    PageFiles,
    SlotRead,
    SlotWrite,
)
from engine.offload.page_records import PageRecord, packed
from engine.ranks import Share
from engine.ranks.job_queue import JobFailed
from engine.ranks.messages import (
    MOST_PAGES,
    ClearSlots,
    EraseSlots,
    FileJob,
    OpenPageFiles,
    ReadSlots,
    WriteSlots,
)
from engine.ranks.processes import Followers

OPEN_S = 60.0
T = TypeVar("T")
Faults = list[FileFault | None]
_FAULTS: tuple[FileFault | None, ...] = (None, *FileFault)  # by number in replies


def version_of_rank(version: bytes, share: Share) -> bytes:
    """Return the version of one rank's part of pages, see version_of."""
    if share.num_ranks == 1:
        return version
    return version[:-3] + bytes((share.node_rank, *share.node))


def _identity(record: PageRecord) -> int:
    """Return a number that identifies the page of a record, independent of its bytes."""
    return xxh3_64_intdigest(packed(record._replace(checksum=0), 0))


class FilesOfRanks:
    """A PageStore over the files of all ranks.

    Args:
        own: files of rank 0. Owned by this object.
        version: version of whole pages.
        num_bytes: size of the files of one rank.
        notify: called when a job of all ranks is done.
    """

    def __init__(
        self,
        own: FileThreads,
        followers: Followers,
        version: bytes,
        num_bytes: int,
        notify: Callable[[], None],
    ) -> None:
        self._own = own
        self._followers = followers
        self._version = version
        self._num_bytes = num_bytes
        self._notify = notify
        self._identities = np.zeros(own.num_slots, np.uint64)

    @property
    def num_slots(self) -> int:
        return self._own.num_slots

    def open(self) -> None:
        """Make all followers open their files. Called before all other jobs.

        Raises:
            ConfigError: a rank cannot open its files.
        """
        where = str(self._own.directory), self._version, self._num_bytes
        try:
            self._followers.ask(OpenPageFiles(*where)).result(OPEN_S)
        except JobFailed as error:
            raise ConfigError(str(error)) from error

    def found(self) -> Iterator[tuple[int, PageRecord]]:
        for slot, record in self._own.found():
            self._identities[slot] = _identity(record)
            yield slot, record

    def write(self, writes: Sequence[SlotWrite]) -> Future[Faults]:
        for each in writes:
            self._identities[each.slot] = _identity(each.record)
        return self._joined(self._own.write(writes), WriteSlots(writes))

    def read(self, reads: Sequence[SlotRead]) -> Future[Faults]:
        identities = [int(self._identities[each.slot]) for each in reads]
        return self._joined(self._own.read(reads), ReadSlots(reads, identities))

    def erase(self, slots: Sequence[int]) -> None:
        self._own.erase(slots)
        for start in range(0, len(slots), MOST_PAGES):
            self._followers.ask(EraseSlots(slots[start : start + MOST_PAGES]))

    def clear(self) -> None:
        self._own.clear()
        self._followers.ask(ClearSlots())

    def close(self) -> None:
        self._own.close()

    def _joined(self, own: Future[Faults], job: FileJob) -> Future[Faults]:
        """Return a future with the first error of each page on any rank."""
        asked = self._followers.ask(job)

        def faults() -> Faults:
            others = [[_FAULTS[number] for number in reply] for reply in asked.result()]
            pages = zip(own.result(), *others, strict=True)
            return [next(filter(None, page), None) for page in pages]

        whole = when_all("an access to page files", [own, asked], faults)
        whole.add_done_callback(lambda _: self._notify())
        return whole


def when_all(what: str, futures: Sequence[Future[Any]], result: Callable[[], T]) -> Future[T]:
    """Return a future that completes when all others have, with `result()`, or with an EngineFault
    that has the error of one of them or of `result`. `what`: the name of the work, for the error.
    """
    whole: Future[T] = Future()
    left, lock = len(futures), threading.Lock()

    def done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            for each in futures:
                each.result()
            made = result()
        except Exception as error:  # noqa: BLE001  reported to the waiter
            whole.set_exception(EngineFault(f"{what} failed: {error}"))
        else:
            whole.set_result(made)

    for each in futures:
        each.add_done_callback(done)
    return whole


class RankFiles:
    """The files of one follower.

    Args:
        host_pages: memory of this rank's host pages, [n, page bytes].
    """

    def __init__(self, share: Share, host_pages: Tensor) -> None:
        self._share = share
        self._memory = host_pages.numpy()
        self._files: FileThreads | None = None
        self._identities = np.zeros(0, np.uint64)

    def take(self, job: FileJob, reply: Callable[[bytes], None]) -> None:
        """Start a job. The reply has a number for each page, see FileFault.

        Raises:
            ConfigError: the files cannot be opened.
        """
        match job:
            case OpenPageFiles():
                self._open(job)
                reply(b"")
            case WriteSlots(writes=writes):
                self._write(
                    [SlotWrite(slot, page, PageRecord(*record)) for slot, page, record in writes],
                    reply,
                )
            case ReadSlots(reads=reads, identities=identities):
                self._read([SlotRead(*each) for each in reads], identities, reply)
            case EraseSlots(slots=slots):
                self._opened.erase(slots)
                reply(b"")
            case ClearSlots():
                self._opened.clear()
                reply(b"")

    @property
    def _opened(self) -> FileThreads:
        if self._files is None:
            raise EngineFault("the page files of this rank are not open")
        return self._files

    def _open(self, job: OpenPageFiles) -> None:
        root = Path(job.directory) / f"rank-{self._share.node_rank}"
        version = version_of_rank(job.version, self._share)
        files = PageFiles(root, self._memory, version=version, num_bytes=job.num_bytes)
        self._identities = np.zeros(files.num_slots, np.uint64)
        for slot, record in files.found():
            self._identities[slot] = _identity(record)
        self._files = FileThreads(files, lambda: None)

    def _write(self, writes: Sequence[SlotWrite], reply: Callable[[bytes], None]) -> None:
        for each in writes:
            self._identities[each.slot] = _identity(each.record)
        self._opened.write(writes).add_done_callback(lambda done: reply(_numbers(done.result())))

    def _read(
        self, reads: Sequence[SlotRead], identities: Sequence[int], reply: Callable[[bytes], None]
    ) -> None:
        pairs = zip(reads, identities, strict=True)
        same = [int(self._identities[each.slot]) == identity for each, identity in pairs]

        def done(future: Future[Faults]) -> None:
            found = iter(future.result())
            reply(_numbers([next(found) if each else FileFault.DAMAGED for each in same]))

        wanted = [each for each, is_same in zip(reads, same, strict=True) if is_same]
        self._opened.read(wanted).add_done_callback(done)


def _numbers(faults: Faults) -> bytes:
    return bytes(_FAULTS.index(fault) for fault in faults)
