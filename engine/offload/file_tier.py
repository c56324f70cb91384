"""The tier of files below host memory: what comes into host memory is written to files beside the
steps, a little at once, and is there when host memory has forgotten it. It is read back into host
memory before somebody who wants it has its turn.

Pages of host memory are held for COPY while they are written, or read into. What a read brings host
memory learns then, if it was right. Of a disk that fails nothing is expected but what it has still.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from common.errors import EngineFault
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.page_keys import PageKey
from engine.kv_cache.pages import Holder
from engine.offload.file_cache import FileCache, FiledPages
from engine.offload.host_cache import HostCache, HostPages
from engine.offload.page_files import Fault, SlotRead, SlotWrite
from engine.offload.page_records import Record

MOST_WRITING = 64  # pages at once,
WRITING_SHARE = 16  # and no more than this part of host memory,
LEAST_WRITING = 8  # or so many
READING_SHARE = 2  # no more than this part of host memory is being read into
READ_TOGETHER = 32  # pages, by one thread
MAX_BEHIND = 1 << 14  # pages of tokens that wait to be written; those that waited longest are not
AFTER_FAULT_S = 60.0  # until it is tried again


class Filed(NamedTuple):
    """A page that is in a file, and not in host memory."""

    key: PageKey
    place: int


class PageStore(Protocol):
    """Beside the steps. Writes are done in their order, `erase` and `clear` between those before
    and those after. Results say of each page why it failed."""

    def write(self, writes: Sequence[SlotWrite]) -> Future[list[Fault | None]]: ...

    def read(self, reads: Sequence[SlotRead]) -> Future[list[Fault | None]]: ...

    def erase(self, slots: Sequence[int]) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Piece(NamedTuple):
    """One page, on its way from host memory to a slot, or back."""

    key: PageKey
    filed: FiledPages
    place: int
    host_page: int

    @property
    def slot(self) -> int:
        return self.filed.slots[self.place]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """
    Attributes:
        futures: of all pieces, one after the other.
        kept: what stays in host memory until it is over.
        held: all pages of these, by this job.
        age: of the tier, when it began.
    """

    futures: Sequence[Future[list[Fault | None]]]
    pieces: Sequence[_Piece]
    kept: Sequence[HostPages]
    held: Ints
    age: int
    then: Callable[[], None]

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def faults(self) -> Iterator[Fault | None]:
        """Of each piece."""
        return chain.from_iterable(future.result() for future in self.futures)

    def host_pages(self) -> Ints:
        return np.array([piece.host_page for piece in self.pieces], np.int32)


class FileTier:
    """Engine thread only.

    Attributes:
        cache: what is in files.
        num_written, num_read: pages, since the start.
        faults: of pages, by kind.
    """

    def __init__(
        self,
        host: HostCache,
        store: PageStore,
        *,
        width: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            host: with the index of what `store` has.
            width: see HostPages.
        """
        self.cache: FileCache = host.files
        self.num_written = 0
        self.num_read = 0
        self.faults: Counter[Fault] = Counter()
        self._host = host
        self._store = store
        self._width = width
        self._now = now
        self._behind: OrderedDict[PageKey, None] = OrderedDict()
        self._writes: deque[_Job] = deque()
        self._reads: list[_Job] = []
        self._num_writing = 0
        self._num_reading = 0
        self._age = 0  # times that everything was forgotten
        self._faulty_until = 0.0
        self._full_until: float | None = None

    @property
    def busy(self) -> bool:
        """Whether pages are being read or written."""
        return bool(self._writes or self._reads)

    def host_pages(self) -> Iterator[Ints]:
        """Of host memory, held for COPY: an array for each hold."""
        for job in (*self._writes, *self._reads):
            yield job.held
        for job in self._reads:
            yield job.host_pages()

    def saved(self, keys: Sequence[PageKey]) -> None:
        """Host memory has more of these."""
        if self.cache.num_slots:
            self._behind.update(dict.fromkeys(keys))
            while len(self._behind) > MAX_BEHIND:
                self._behind.popitem(last=False)

    def poll(self) -> None:
        """Takes up what is done, and goes on with what has waited for its turn."""
        while self._writes and self._writes[0].done:
            self._written(self._writes.popleft())
        for job in [job for job in self._reads if job.done]:
            self._reads.remove(job)
            self._have_read(job)
        if self._behind:
            self._write_next()

    def read(
        self, wanted: Sequence[Filed], kept: Sequence[HostPages], then: Callable[[], None]
    ) -> bool:
        """Begins to read these back into host memory. True: `then` is going to be called, by
        `poll`, when that is over, with what of it was right in host memory.

        Args:
            wanted: as `cache` has them now.
            kept: stays in host memory until then, and while it is called.
        """
        num_pages = len(wanted)
        if self._num_reading + num_pages > self._host.pages.num_pages // READING_SHARE:
            return False
        held = self._host.pin(kept)
        pages = self._host.allocate(num_pages, Holder.COPY)
        if pages is None:
            self._host.unpin(kept, held)
            return False
        pairs = zip(wanted, pages.tolist(), strict=True)
        pieces = [_Piece(each.key, self._filed(each.key), each.place, page) for each, page in pairs]
        for piece in pieces:
            self.cache.use(piece.filed)
        self._num_reading += num_pages
        reads = [SlotRead(piece.slot, piece.host_page) for piece in pieces]
        futures = [
            self._store.read(reads[start : start + READ_TOGETHER])
            for start in range(0, num_pages, READ_TOGETHER)
        ]
        self._reads.append(_Job(futures, pieces, kept, held, self._age, then))
        return True

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Those that are here, so that nobody finds them after a restart either."""
        found = ((key, self.cache.get(key)) for key in keys)
        gone = [(key, filed) for key, filed in found if filed is not None]
        for key, _ in gone:
            self.cache.remove(key)
        self._host.left_files(gone)
        if gone:
            self._store.erase([slot for _, filed in gone for slot in filed.present()])

    def clear(self) -> None:
        """Forgets everything. What is on its way is nobody's then."""
        self._age += 1
        self._behind.clear()
        self._host.left_files(self.cache.clear())
        self._store.clear()

    def close(self) -> None:
        """Waits for what is being read and written; the rest is given up."""
        self._store.close()

    def check(self) -> None:
        """Raises EngineFault where slots and keys disagree. O(slots)."""
        self.cache.check()

    # To files -------------------------------------------------------------------------------------

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
        kept: list[HostPages] = []
        while self._behind and room > 0:
            key = next(iter(self._behind))
            mine = self._host.get(key)
            places = self._lacking(key, mine)
            if mine is not None and places:
                slots = self._slots(len(places)) if len(places) <= room or not pieces else None
                if slots is None:
                    break
                begun = self._begin_to_write(key, mine, dict(zip(places, slots, strict=True)))
                pieces += begun
                writes += map(self._slot_write, begun)
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

    def _lacking(self, key: PageKey, kept: HostPages | None) -> list[int]:
        """Places that host memory has of it, and files have not. None if not all of it is there
        yet: it comes again when it is."""
        if kept is None or kept.saves:
            return []
        filed = self.cache.get(key)
        slots = [NO_PAGE] * self._width if filed is None else filed.slots
        pairs = enumerate(zip(kept.pages, slots, strict=True))
        return [place for place, (page, slot) in pairs if page != NO_PAGE and slot == NO_PAGE]

    def _slots(self, num_slots: int) -> list[int] | None:
        allocated = self.cache.allocate(num_slots)
        if allocated is None:
            return None
        slots, gone = allocated
        self._host.left_files(gone)
        return slots

    def _begin_to_write(
        self, key: PageKey, kept: HostPages, slots: Mapping[int, int]
    ) -> list[_Piece]:
        """slots: by place."""
        filed = self.cache.add(key, kept.name, in_tree=kept.in_tree)
        for place, slot in slots.items():
            filed.slots[place] = slot
            filed.writes += 1
            self.cache.use(filed)
        return [_Piece(key, filed, place, kept.pages[place]) for place in slots]

    def _slot_write(self, piece: _Piece) -> SlotWrite:
        name, order = piece.filed.name, self.cache.next_order()
        record = Record(piece.key, name, order, 0, piece.place, self._width)
        return SlotWrite(piece.slot, piece.host_page, record)

    def _written(self, job: _Job) -> None:
        for piece, fault in zip(job.pieces, job.faults(), strict=True):
            piece.filed.writes -= 1
            self._end(job, piece, fault)
            self.num_written += fault is None
        self._num_writing -= len(job.pieces)
        self._host.unpin(job.kept, job.held)

    # From files -----------------------------------------------------------------------------------

    def _filed(self, key: PageKey) -> FiledPages:
        filed = self.cache.get(key)
        if filed is None:
            raise EngineFault("no file has a page that is to be read")
        return filed

    def _have_read(self, job: _Job) -> None:
        right = []
        for piece, fault in zip(job.pieces, job.faults(), strict=True):
            if fault is None and self.cache.get(piece.key) is piece.filed:  # else it is forgotten
                right.append(piece)
            self._end(job, piece, fault)
        self._num_reading -= len(job.pieces)
        if job.age == self._age:
            self.num_read += len(right)
            self._host.take_in(right, self._width)
        self._host.pages.drop(job.host_pages(), Holder.COPY)
        job.then()
        self._host.unpin(job.kept, job.held)

    # Either way -----------------------------------------------------------------------------------

    def _end(self, job: _Job, piece: _Piece, fault: Fault | None) -> None:
        """What failed is not looked for in files any more."""
        key, filed = piece.key, piece.filed
        if fault is not None:
            self._note(fault, piece)
            if self.cache.get(key) is filed:
                self.cache.remove(key)
                self._host.left_files([(key, filed)])
        if job.age == self._age:
            self.cache.let_go(filed)

    def _note(self, fault: Fault, piece: _Piece) -> None:
        self.faults[fault] += 1
        if fault is Fault.FULL:
            self.cache.limit_to(piece.slot)
            self._full_until = self._now() + AFTER_FAULT_S
        elif fault is Fault.WRITE:
            self._faulty_until = self._now() + AFTER_FAULT_S
