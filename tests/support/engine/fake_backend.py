"""An engine's backend without a model.

The next token of a request is a hash of its tokens. The runner reads those tokens from the given
pages, so that wrong page handling gives wrong tokens. The "KV" of a token is the token itself, in
every table, of which the first is a full table. Each state page has the number of its tokens and
their hash. A test decides the delay of copies and files. Some are executed early and reported late.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from common.requests.namespace import Namespace
from engine.batch.batch import (
    NOT_FINITE,
    NOT_SAMPLED,
    AcceptedRuns,
    BatchResult,
    ForwardMode,
    Ints,
    PageCopies,
    ScheduleBatch,
)
from engine.batch.table import SlotTable
from engine.core import CoreShape
from engine.offload.page_files import FileFault, PageFiles, SlotRead, SlotWrite
from engine.offload.page_records import PageRecord

VOCABULARY = 97
Faults = list[FileFault | None]
T = TypeVar("T")


def next_token(tokens: Sequence[int] | Ints, vocabulary_size: int) -> int:
    """Return the token of the fake model after these tokens. The oracle of every test."""
    values = np.asarray(tokens, np.uint64)
    weights = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = int((values * weights + (weights >> np.uint64(17))).sum())
    return (mixed >> 23) % vocabulary_size


def foretold(tokens: Sequence[int], count: int, vocabulary_size: int) -> list[int]:
    """Return the next `count` tokens of the fake model after these."""
    new: list[int] = []
    for _ in range(count):
        new.append(next_token([*tokens, *new], vocabulary_size))
    return new


def state_of(tokens: Sequence[int] | Ints) -> Ints:
    """Return the content of a state page after these tokens."""
    return np.array([len(tokens), next_token(tokens, 1 << 30)], np.int32)


class FakeBackend:
    """The pages of a device and of its host.

    Attributes:
        written_in: namespace in which each device page was written.
        on_host: namespace of each host page. None: state pages, for which it is not recorded.
    """

    def __init__(self, shape: CoreShape) -> None:
        page_size = shape.tables.page_size
        self.kv = np.full((shape.num_pages, page_size), -1, np.int32)
        self.host_kv = np.full((shape.num_host_pages, page_size), -1, np.int32)
        self.written_in: dict[int, Namespace] = {}
        self.on_host: dict[int, Namespace | None] = {}
        self.copier = FakeCopier(self)


@dataclass(eq=False)
class FakeLaunched:
    """A launched step: the batch, copies of all inputs of its forward, and the result."""

    batch: ScheduleBatch
    runner: "FakeRunner"
    page_tables: Ints
    states: Ints  # state pages by row
    token_ids: Ints  # tokens of the rows' requests, of which `known` are valid
    known: Ints
    tokens: Ints | None = None
    runs: AcceptedRuns | None = None

    def sample(self) -> None:
        pass

    def result(self) -> BatchResult:
        while self.tokens is None:
            self.runner.run_oldest()
        return BatchResult(self.tokens, runs=self.runs)


class FakeRunner:
    """Runs each forward as late as possible, when its result is requested, like a slow device.

    Pages must not be reused before that.

    Args:
        poison: token that makes the logits of its request NaN.
    """

    def __init__(
        self,
        table: SlotTable,
        backend: "FakeBackend",
        *,
        vocabulary_size: int = VOCABULARY,
        poison: int | None = None,
    ) -> None:
        self._table = table
        self._vocabulary_size = vocabulary_size
        self._poison = poison
        self.kv, self.host_kv = backend.kv, backend.host_kv
        self._future = np.zeros(table.num_slots, np.int32)
        self._rejected = np.zeros(table.num_slots, np.int32)
        self._queue: deque[FakeLaunched] = deque()
        self._split: FakeLaunched | None = None  # launched, with groups of layers still to run
        self.batches: list[ScheduleBatch] = []
        self.num_tokens = 0  # computed, over all forwards
        self.num_done = 0  # forwards
        self.done_at_launch: list[int] = []  # num_done, per launch

    def launch(self, batch: ScheduleBatch) -> FakeLaunched:
        if batch.layers is not None and batch.layers.first:
            assert self._split is not None  # its inputs are those of the first group
            launched = replace(self._split, batch=batch, tokens=None)
        else:
            launched = FakeLaunched(
                batch,
                self,
                self._table.page_table[batch.slots].copy(),
                self._table.state[batch.slots].copy(),
                self._table.tokens[batch.slots].copy(),
                self._table.known[batch.slots].copy(),
            )
        if (layers := batch.layers) is not None:
            self._split = None if layers.is_last or layers.drops else launched
        self.batches.append(batch)
        self.done_at_launch.append(self.num_done)
        self._queue.append(launched)
        return launched

    def run_oldest(self) -> None:
        launched = self._queue.popleft()
        launched.tokens, launched.runs = self._forward(launched)
        self.num_done += 1

    def _forward(self, launched: FakeLaunched) -> tuple[Ints, AcceptedRuns | None]:
        batch, size = launched.batch, self._table.page_size
        if batch.swap_out is not None:
            self.host_kv[batch.swap_out.host_pages] = self.kv[batch.swap_out.device_pages]
        if batch.swap_in is not None:
            self.kv[batch.swap_in.device_pages] = self.host_kv[batch.swap_in.host_pages]
        early = np.zeros_like(batch.starts)
        if batch.early is not None:
            early = np.minimum(self._rejected[batch.slots], batch.early)
        starts, ends = batch.starts - early, batch.ends - early
        for i, (slot, start, end) in enumerate(zip(batch.slots, starts, ends, strict=True)):
            at = np.arange(start, end)
            tokens = launched.token_ids[i, at]
            if start >= launched.known[i]:
                tokens[0] = self._future[slot]
            for pages in launched.page_tables[i]:
                self.kv[pages[at // size], at % size] = tokens
        if batch.layers is not None and not batch.layers.is_last:
            count = len(batch.slots) if batch.layers.drops else 0
            return np.full(count, NOT_SAMPLED, np.int32), None
        reads, kept = launched.states.copy(), {state.row: state for state in batch.kept}
        for state in batch.resumed:
            reads[state.row] = state.pages
        longest = max(ends - starts, default=0)
        sampled = np.full(len(batch.slots), NOT_SAMPLED, np.int32)
        runs = AcceptedRuns(
            np.full((len(starts), longest), NOT_SAMPLED, np.int32), np.zeros_like(ends)
        )
        for i, (slot, start, end) in enumerate(zip(batch.slots, starts, ends, strict=True)):
            self.num_tokens += int(end - start)
            seen = self._seen(launched.page_tables[i], int(start), int(end))
            if start and (self.kv[reads[i], :2] != state_of(seen[:start])).any():
                seen = np.full_like(seen, -1)
            if i in kept:
                self.kv[kept[i].pages, :2] = state_of(seen[: start + kept[i].num_tokens])
            stands = int(end)
            if batch.mode is ForwardMode.VERIFY:
                run = self._run(seen, int(start))
                runs.tokens[i, : len(run)] = run
                runs.counts[i] = len(run)
                self._rejected[slot] = end - start - len(run)
                token, stands = run[-1], int(start) + len(run)
            else:
                token = self._sample(seen)
            self.kv[launched.states[i], :2] = state_of(seen[:stands])
            if batch.samples[i] or token == NOT_FINITE:
                sampled[i] = token
            if batch.samples[i]:
                self._future[slot] = max(0, token)
        return sampled, runs if batch.mode is ForwardMode.VERIFY else None

    def _run(self, seen: Ints, start: int) -> list[int]:
        """Return the tokens after the one at `start` and after each accepted draft."""
        run = [self._sample(seen[: start + 1])]
        while start + len(run) < len(seen) and seen[start + len(run)] == run[-1]:
            run.append(self._sample(seen[: start + len(run) + 1]))
        return run

    def _seen(self, page_tables: Ints, start: int, end: int) -> Ints:
        """Return the KV before `end` from the full table. Invalid if windows differ."""
        size, tables = self._table.page_size, self._table.tables
        at = np.arange(end)
        kv = self.kv[page_tables[0, at // size], at % size]
        for table, window in tables.sliding:
            visible = at[max(0, start - window + 1) :]
            pages = page_tables[table, visible // size]
            if (pages < 0).any() or (self.kv[pages, visible % size] != kv[visible]).any():
                return np.full_like(kv, -1)
        return kv

    def _sample(self, kv: Ints) -> int:
        if self._poison is not None and (kv == self._poison).any():
            return NOT_FINITE
        return next_token(kv.astype(np.int64), self._vocabulary_size)


class LateFuture(Future[T]):
    """A future whose work is done when it is polled for the last time, or before.

    Args:
        left: polls until it is done.
    """

    def __init__(self, work: Callable[[], None], left: int) -> None:
        super().__init__()
        self._work = work
        self._left = left

    def done(self) -> bool:
        if self._left:
            self._left -= 1
            return False
        self._work()
        return super().done()


@dataclass(eq=False)
class FakeCopier:
    """A copier between device and host pages, with delays set by a test.

    Attributes:
        delays: delays of the next copies, in polls. Later copies have none.
    """

    backend: "FakeBackend"
    delays: deque[int] = field(default_factory=deque)
    num_copies: int = 0

    def save(self, copies: PageCopies) -> Future[None]:
        return self._begin(copies, loads=False)

    def load(self, copies: PageCopies) -> Future[None]:
        return self._begin(copies, loads=True)

    def move(self, copies: PageCopies, *, loads: bool) -> None:
        backend = self.backend
        kv, host = backend.kv, backend.host_kv
        pairs = zip(copies.device_pages.tolist(), copies.host_pages.tolist(), strict=True)
        if loads:
            kv[copies.device_pages] = host[copies.host_pages]
            known = {page: backend.on_host.get(there) for page, there in pairs}
            backend.written_in |= {
                page: whose for page, whose in known.items() if whose is not None
            }
        else:
            host[copies.host_pages] = kv[copies.device_pages]
            backend.on_host |= {there: backend.written_in.get(page) for page, there in pairs}

    def _begin(self, copies: PageCopies, *, loads: bool) -> Future[None]:
        self.num_copies += 1
        delay = self.delays.popleft() if self.delays else 0

        def move() -> None:
            if not Future.done(copy):
                self.move(copies, loads=loads)
                copy.set_result(None)

        copy = LateFuture[None](move, delay)
        if self.num_copies % 3 == 0:
            move()
        return copy


@dataclass(eq=False)
class LateFiles:
    """A store that reads and writes real files without threads, with delays set by a test.

    Attributes:
        whose: namespace of each slot.
        delays: delays of the next reads and writes, in polls. Later ones have none.
    """

    files: PageFiles
    backend: "FakeBackend"
    whose: dict[int, Namespace | None] = field(default_factory=dict)
    delays: deque[int] = field(default_factory=deque)
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._in_order: deque[Callable[[], None]] = deque()  # writes that are not done yet

    @property
    def num_slots(self) -> int:
        return self.files.num_slots

    def found(self) -> Iterator[tuple[int, PageRecord]]:
        return self.files.found()

    def write(self, writes: Sequence[SlotWrite]) -> LateFuture[Faults]:
        def work() -> None:
            self.whose |= {each.slot: self.backend.on_host.get(each.host_page) for each in writes}
            future.set_result(self.files.write(writes))

        future = self._future(lambda: self._catch_up(future))
        self._in_order.append(work)
        if self.num_calls % 3 == 0:
            self._catch_up(future)
        return future

    def read(self, reads: Sequence[SlotRead]) -> LateFuture[Faults]:
        def work() -> None:
            if not Future.done(future):
                self.backend.on_host |= {
                    each.host_page: self.whose.get(each.slot) for each in reads
                }
                future.set_result(self.files.read(reads))

        future = self._future(work)
        if self.num_calls % 3 == 0:
            work()
        return future

    def erase(self, slots: Sequence[int]) -> None:
        self._in_order.append(lambda: self.files.erase(slots))

    def clear(self) -> None:
        self._in_order.append(self.files.clear)

    def close(self) -> None:
        while self._in_order:
            self._in_order.popleft()()
        self.files.close()

    def _future(self, work: Callable[[], None]) -> LateFuture[Faults]:
        self.num_calls += 1
        return LateFuture[Faults](work, self.delays.popleft() if self.delays else 0)

    def _catch_up(self, future: LateFuture) -> None:
        """Execute all earlier writes, and this one."""
        while not Future.done(future):
            self._in_order.popleft()()
