"""The file tier below host memory.

Pages that enter host memory are also written to files, a few at a time and concurrently with steps.
After host memory has evicted them, they can be read back into it, before the request that needs
them is scheduled.

Writes and reads hold pages of host memory (COPY). Read pages are added to host memory at the end of
the read, if their checksums are correct. After a disk error the tier only uses the entries that it
still has.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix_nodes import PageKey
from engine.offload.file_cache import FileCache
from engine.offload.host_cache import HostCache
from engine.offload.page_files import FileFault, SlotRead, SlotWrite
from engine.offload.page_records import PageRecord
from engine.offload.tier_index import TierEntry

MOST_WRITING = 64  # limit of pages that are written at the same time
WRITING_SHARE = 16  # at most 1 / WRITING_SHARE of host memory is being written,
LEAST_WRITING = 8  # but at least this number of pages
READING_SHARE = 2  # reads may use at most 1 / READING_SHARE of host memory
READ_TOGETHER = 32  # pages per job of a thread
MAX_BEHIND = 1 << 14  # limit of queued pages of tokens. Beyond it the oldest are not written
AFTER_FAULT_S = 60.0  # seconds until the next attempt after an error


class StoredPage(NamedTuple):
    """A page that is in a file and not in host memory. `entry`: its entry in the index of files."""

    key: PageKey
    entry: TierEntry
    place: int


class PageStore(Protocol):
    """An asynchronous store of pages. Writes, `erase` and `clear` run in order. Results have the
    error of each page, or None."""

    @property
    def num_slots(self) -> int:
        """Number of slots, of one page each."""
        ...

    def found(self) -> Iterable[tuple[int, PageRecord]]:
        """Yield slots and records of an earlier process. Must be exhausted before the first
        write."""
        ...

    def write(self, writes: Sequence[SlotWrite]) -> Future[list[FileFault | None]]: ...

    def read(self, reads: Sequence[SlotRead]) -> Future[list[FileFault | None]]: ...

    def erase(self, slots: Sequence[int]) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Piece(NamedTuple):
    """One page that is copied from host memory to a slot, or back."""

    key: PageKey
    filed: TierEntry
    place: int
    host_page: int

    @property
    def slot(self) -> int:
        return self.filed.places[self.place]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A group of reads or writes in progress.

    Attributes:
        kept: entries that stay in host memory until the job is done.
        held: all pages of these entries. This job holds them.
        age: the tier's age when the job began.
    """

    futures: Sequence[Future[list[FileFault | None]]]
    pieces: Sequence[_Piece]
    kept: Sequence[TierEntry]
    held: Ints
    age: int
    then: Callable[[], None]

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def faults(self) -> Iterator[FileFault | None]:
        """Yield the error of each piece, or None."""
        return chain.from_iterable(future.result() for future in self.futures)

    def host_pages(self) -> Ints:
        return np.array([piece.host_page for piece in self.pieces], np.int32)


class FileTier:
    """The file tier. Engine thread only.

    Attributes:
        num_written, num_read: pages since the start.
        faults: number of pages with an error, by kind.

    Args:
        cache: the entries and slots of `store`. The index is below that of `host`.
    """

    def __init__(
        self,
        host: HostCache,
        cache: FileCache,
        store: PageStore,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.num_written = 0
        self.num_read = 0
        self.faults: Counter[FileFault] = Counter()
        self._host = host
        self._store = store
        self._now = now
        self._behind: OrderedDict[PageKey, None] = OrderedDict()
        self._writes: deque[_Job] = deque()
        self._reads: list[_Job] = []
        self._num_writing = 0
        self._num_reading = 0
        self._age = 0  # number of times that everything was removed
        self._faulty_until = 0.0
        self._full_until: float | None = None

    @property
    def busy(self) -> bool:
        """Return whether pages are being read or written."""
        return bool(self._writes or self._reads)

    def host_pages(self) -> Iterator[Ints]:
        """Yield the pages of host memory held for COPY, one array per hold."""
        for job in (*self._writes, *self._reads):
            yield job.held
        for job in self._reads:
            yield job.host_pages()

    def saved(self, keys: Sequence[PageKey]) -> None:
        """Queue keys for which host memory has new pages."""
        self._behind.update(dict.fromkeys(keys))
        while len(self._behind) > MAX_BEHIND:
            self._behind.popitem(last=False)

    def poll(self) -> None:
        """Finish the jobs that are done, and start the next queued writes."""
        while self._writes and self._writes[0].done:
            self._written(self._writes.popleft())
        for job in [job for job in self._reads if job.done]:
            self._reads.remove(job)
            self._have_read(job)
        if self._behind:
            self._write_next()

    def read(
        self, wanted: Sequence[StoredPage], kept: Sequence[TierEntry], then: Callable[[], None]
    ) -> bool:
        """Start reading pages back into host memory.

        Args:
            wanted: pages that files have now.
            kept: entries that stay in host memory until `then` returns.
            then: called by `poll` at the end of the read, when the correct pages are in host
                memory.
        Returns:
            False if the read was not started. Then nothing has changed.
        """
        num_pages = len(wanted)
        if self._num_reading + num_pages > self._host.pages.num_pages // READING_SHARE:
            return False
        held = self._host.pin(kept)
        pages = self._host.allocate(num_pages, PageHolder.COPY)
        if pages is None:
            self._host.unpin(kept, held)
            return False
        pairs = zip(wanted, pages.tolist(), strict=True)
        pieces = [_Piece(*each, page) for each, page in pairs]
        for piece in pieces:
            piece.filed.uses += 1
        self._num_reading += num_pages
        reads = [SlotRead(piece.slot, piece.host_page) for piece in pieces]
        futures = [
            self._store.read(reads[start : start + READ_TOGETHER])
            for start in range(0, num_pages, READ_TOGETHER)
        ]
        self._reads.append(_Job(futures, pieces, kept, held, self._age, then))
        return True

    def forget(self, keys: Collection[PageKey]) -> None:
        """Remove these keys if they are here, so that they are not found after a restart either."""
        gone = self.cache.remove(keys)
        self._host.report_lost(gone)
        if gone:
            self._store.erase([slot for _, filed in gone for slot in filed.present()])

    def clear(self) -> None:
        """Remove everything. The results of jobs in progress are discarded."""
        self._age += 1
        self._behind.clear()
        self._host.report_lost(self.cache.clear())
        self._store.clear()

    def close(self) -> None:
        """Wait for running reads and for submitted writes. Cancel queued reads."""
        self._store.close()

    def _write_next(self) -> None:
        now = self._now()
        if now < self._faulty_until:
            return
        if self._full_until is not None and now >= self._full_until:
            self._full_until = None
            self.cache.lift_limit()
        room = self._room_to_write()
        writes: list[SlotWrite] = []
        pieces: list[_Piece] = []
        kept: list[TierEntry] = []
        while self._behind and room > 0:
            key = next(iter(self._behind))
            mine = self._host.index.get(key)
            places = self._lacking(key, mine)
            if mine is not None and places:
                begun = len(places) <= room or not pieces
                new = self._begin_to_write(key, mine, places) if begun else []
                if not new:
                    break
                pieces += new
                writes += map(self._slot_write, new)
                kept.append(mine)
                room -= len(places)
            del self._behind[key]
        if pieces:
            self._num_writing += len(pieces)
            held = self._host.pin(kept)
            futures = [self._store.write(writes)]
            self._writes.append(_Job(futures, pieces, kept, held, self._age, lambda: None))

    def _room_to_write(self) -> int:
        most = min(self._host.pages.num_pages // WRITING_SHARE, MOST_WRITING)
        return max(most, LEAST_WRITING) - self._num_writing

    def _lacking(self, key: PageKey, kept: TierEntry | None) -> list[int]:
        """Return the places that host memory has and files do not. Return none during a save, after
        which the key is queued again."""
        if kept is None or kept.writes:
            return []
        filed = self.cache.index.get(key)
        slots = [NO_PAGE] * len(kept.places) if filed is None else filed.places
        pairs = enumerate(zip(kept.places, slots, strict=True))
        return [place for place, (page, slot) in pairs if page != NO_PAGE and slot == NO_PAGE]

    def _begin_to_write(self, key: PageKey, kept: TierEntry, places: Sequence[int]) -> list[_Piece]:
        """Create the pieces of a write. Return none if there are not enough slots."""
        allocated = self.cache.allocate(len(places))
        if allocated is None:
            return []
        slots, gone = allocated
        self._host.report_lost(gone)
        filed = self.cache.index.add(key, kept.name, in_tree=kept.in_tree)
        filed.uses += len(places)
        filed.writes += len(places)
        for place, slot in zip(places, slots, strict=True):
            filed.places[place] = slot
        return [_Piece(key, filed, place, kept.places[place]) for place in places]

    def _slot_write(self, piece: _Piece) -> SlotWrite:
        name, order = piece.filed.name, self.cache.next_order()
        record = PageRecord(piece.key, name, order, 0, piece.place, self.cache.index.width)
        return SlotWrite(piece.slot, piece.host_page, record)

    def _written(self, job: _Job) -> None:
        for piece, fault in zip(job.pieces, job.faults(), strict=True):
            piece.filed.writes -= 1
            self._end(job, piece, fault)
            self.num_written += fault is None
        self._num_writing -= len(job.pieces)
        self._host.unpin(job.kept, job.held)

    def _have_read(self, job: _Job) -> None:
        right = []
        for piece, fault in zip(job.pieces, job.faults(), strict=True):
            # Otherwise it was removed.
            if fault is None and self.cache.index.get(piece.key) is piece.filed:
                right.append(piece)
            self._end(job, piece, fault)
        self._num_reading -= len(job.pieces)
        if job.age == self._age:
            self.num_read += len(right)
            self._host.take_in(right)
        self._host.pages.drop(job.host_pages(), PageHolder.COPY)
        job.then()
        self._host.unpin(job.kept, job.held)

    def _end(self, job: _Job, piece: _Piece, fault: FileFault | None) -> None:
        """End a piece. After an error, remove its entry from the index."""
        key, filed = piece.key, piece.filed
        if fault is not None:
            self._note(fault, piece)
            if self.cache.index.get(key) is filed:
                self._host.report_lost(self.cache.remove([key]))
        if job.age == self._age:
            self.cache.release(filed)

    def _note(self, fault: FileFault, piece: _Piece) -> None:
        self.faults[fault] += 1
        if fault is FileFault.FULL:
            self.cache.limit_to(piece.slot)
            self._full_until = self._now() + AFTER_FAULT_S
        elif fault is FileFault.WRITE:
            self._faulty_until = self._now() + AFTER_FAULT_S
