"""An engine without a model: the product's core, scheduler and loop over a fake backend.

Between steps the role allocates every free page as a transfer would, overwrites it, and mostly
keeps one until the next step. A request that reads a page after its release therefore gets wrong
tokens, and a late write is detected. So is a cached page that comes from another namespace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.page_tables import PageTables, num_pages_of
from common.requests.logprobs import NOTHING, PredictionUsage
from common.requests.namespace import Namespace, as_bytes
from common.requests.sampling import SamplingParams
from engine.batch.batch import BatchResult, Ints, LaunchedBatch, ScheduleBatch
from engine.batch.holding import NO_PAGE, PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.core import CoreShape, EngineCore
from engine.kv_cache.pages import PageHolder
from engine.loop.loop import EventLoop
from engine.offload.file_cache import HEADER_BYTES, RECORD_BYTES, version_of
from engine.offload.page_files import PageFiles
from engine.scheduler.scheduler import ChunkDone, FinishedRequest, Scheduler
from engine.speculative import Speculator
from tests.support.fake_backend import (
    VOCABULARY,
    FakeBackend,
    FakeRunner,
    LateFiles,
    next_token,
    state_of,
)
from tests.support.fake_clock import FakeClock
from tests.support.specs import make_request

CHUNK_TOKENS = 2048  # if the configuration does not limit chunks
_SCRIBBLE = -7


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


@dataclass(eq=False)
class Rig:
    """One engine. `step` runs one iteration of the loop and checks all page holders."""

    num_pages: int = 64
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)  # by table
    state_pages: int = 0
    num_slots: int = 8
    context: int = 1024
    host_pages: int = 64
    tier_pages: int = 0
    file_dir: Path | None = None  # of the tier below host memory
    file_pages: int = 0
    made_with: bytes = b""  # weights
    whose: dict[int, Namespace | None] = field(default_factory=dict)  # namespace of each file slot
    eos: tuple[int, ...] = ()
    overlap: bool = True
    overlap_prefills: bool = True
    prefix_cache: bool = True
    lifo: bool = True
    vandal: bool = True
    poison: int | None = None
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculator: Speculator | None = None
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        tables = PageTables(self.page_size, self.windows, self.state_pages)
        chunk = self.config.chunked_prefill_tokens or CHUNK_TOKENS
        shape = CoreShape(
            tables,
            self.context,
            self.num_pages,
            self.host_pages,
            self.tier_pages,
            None if chunk < 0 else max(chunk, self.page_size),
        )
        self.backend = FakeBackend(shape)
        self.copier, self.store = self.backend.copier, self._files()
        self.core = EngineCore.make(
            EngineConfig(
                model="fake",
                cache=CacheConfig(prefix_cache=self.prefix_cache),
                scheduler=self.config.model_copy(update={"max_running_requests": self.num_slots}),
            ),
            shape,
            RequestLimits(self.context, VOCABULARY, tables, self.num_pages, eos_token_ids=self.eos),
            self.copier,
            store=self.store,
            speculator=self.speculator,
            lifo=self.lifo,
            clock=self.clock,
        )
        self.table, self.pages = self.core.table, self.core.pages
        self.cache, self.tiers = self.core.cache, self.core.tiers
        self.admitted: list[tuple[int, Ints]] = []
        self.scheduler = Scheduler(self.config, self.core, self._on_admit)
        self.coming: dict[int, Request] = {}  # by key
        self.role = RigRole(self)
        self.use(FakeRunner(self.table, self.backend, poison=self.poison))
        self.in_flight: LaunchedBatch | None = None
        self.tokens: dict[int, list[int]] = {}
        self.predicted: dict[int, PredictionUsage] = {}  # of those with a prediction
        self.finished: dict[int, RequestEnd] = {}
        self.chunks: list[ChunkDone] = []
        self.requests: dict[int, Request] = {}
        self.came_with: dict[int, Ints] = {}  # a recomputed request's own tokens have grown
        self.before_poll: list[Callable[[], None]] = []
        self.landed: list[tuple[Request, PageHolding]] = []
        self.trials: list[int] = []  # keys, one for each step of a suspect alone

    def _files(self) -> LateFiles | None:
        if self.file_dir is None:
            return None
        memory = self.backend.host_kv.view(np.uint8)
        files = PageFiles(
            self.file_dir,
            memory,
            version=version_of({}, self.made_with),
            num_bytes=HEADER_BYTES + self.file_pages * (memory.shape[1] + RECORD_BYTES),
        )
        return LateFiles(files, self.backend, self.whose)

    def use(self, runner: FakeRunner) -> None:
        """Run the engine on this runner."""
        self.runner = runner
        beside = {"overlap": self.overlap, "overlap_prefills": self.overlap_prefills}
        self.loop = EventLoop(self.role, runner, **beside)

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        generated: Sequence[int] = (),
        stop: tuple[int, ...] = (),
        ignore_eos: bool = False,
        suspect: bool = False,
        prediction: Sequence[int] = (),
        **fields: Any,
    ) -> Request:
        """Make a request with the next key. For `fields` see make_request."""
        key = len(self.requests) + 1
        request = make_request(
            [*prompt, *generated],
            key=key,
            request_id=f"r{key}",
            num_generated=len(generated),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                seed=key,
                temperature=0.0,
                stop_token_ids=stop,
                ignore_eos=ignore_eos,
            ),
            prediction=as_bytes(prediction),
            **fields,
        )
        if suspect:
            request.quarantine_after(engine_deaths=1)
        self.requests[key] = request
        self.came_with[key] = request.token_ids
        self.tokens[key] = []
        return request

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        request = self.request(prompt, max_tokens, **options)
        self.scheduler.add(request)
        return request

    def come(self, request: Request) -> None:
        """Add a request after its prefix is loaded from the tier below."""

        def add() -> None:
            if self.coming.pop(request.key, None) is not None:
                self.scheduler.add(request)

        self.coming[request.key] = request
        room = self.scheduler.free_capacity().num_pages
        way = self.tiers.way(request.token_ids[:-1], request.namespace)
        if way is None or not self.tiers.bring(way, room, add):
            add()

    def land(self, request: Request) -> bool:
        """Reserve a request's pages as a decode node does, and write the KV of all its tokens but
        the last. Keep the request until `join_landed`. Return False if there is no capacity."""
        if self.scheduler.free_capacity().num_slots <= 0:
            return False
        size, token_ids, tables = self.page_size, request.token_ids[:-1], self.table.tables
        cached = self.cache.match(token_ids, request.namespace).shared
        prefix_tokens = cached.shape[1] * size
        self.pages.hold(cached.ravel(), PageHolder.REQUEST)
        spans = tables.handed_over(len(token_ids), prefix_tokens)
        fresh = self.scheduler.allocate(num_pages_of(spans), PageHolder.REQUEST)
        if fresh is None:
            self.pages.drop(cached.ravel(), PageHolder.REQUEST)
            return False
        pages = np.full((tables.num_tables, tables.num_pages(len(token_ids))), NO_PAGE, np.int32)
        pages[: tables.num_full, : cached.shape[1]] = cached
        place = 0
        for table, first, past in spans[: tables.num_tables]:
            mine = pages[table, first:past] = fresh[place : place + past - first]
            place += past - first
            landing = token_ids[first * size : past * size]
            self.runner.kv[mine, :] = np.resize(landing, (len(mine), size))
        self.runner.kv[fresh[place:], :2] = state_of(token_ids)
        holding = PageHolding(pages, fresh[place:])
        self._check_whose(request, holding.flat())
        self.landed.append((request, holding))
        self.scheduler.kept.slots = len(self.landed)
        return True

    def join_landed(self) -> None:
        for request, holding in self.landed:
            assert self.scheduler.join(request, holding)
        self.landed.clear()
        self.scheduler.kept.slots = 0

    def note_pages(self) -> None:
        """Record the pages that running requests write, including pages granted after their
        admission."""
        for request in self.requests.values():
            if request.slot is not None:
                pages = self.table.pages_of(request.slot).tolist()
                self.backend.written_in |= dict.fromkeys(pages, request.namespace)

    def _on_admit(self, request: Request, holding: PageHolding) -> None:
        pages = holding.flat()
        self._check_whose(request, pages)
        self.admitted.append((request.key, pages))

    def check_alone(self, batch: ScheduleBatch) -> None:
        """Check that a suspect shares neither forward nor device until it has enough tokens."""
        keys = self.table.origin_request[batch.slots].tolist()
        has = {key: len(self.came_with[key]) + len(self.tokens[key]) for key in keys}
        kept_apart = [key for key in keys if has[key] < self.requests[key].alone_until]
        if kept_apart:
            assert kept_apart == keys
            assert self.in_flight is None
        self.trials += kept_apart
        on_trial = self.scheduler.on_trial
        assert [on_trial.key] == keys if on_trial is not None else not kept_apart

    def _check_whose(self, request: Request, pages: Ints) -> None:
        """Check that the cached pages at its start belong to its namespace."""
        cached = pages[self.pages.holds(PageHolder.CACHE)[pages] > 0].tolist()
        assert {self.backend.written_in[page] for page in cached} <= {request.namespace}
        self.backend.written_in |= dict.fromkeys(pages.tolist(), request.namespace)

    def expected(self, request: Request) -> tuple[list[int], FinishReason]:
        """Return the expected tokens of a request, computed with a plain loop."""
        sampling = request.sampling
        tokens = self.came_with[request.key].tolist()
        new: list[int] = []
        limit = min(
            request.num_prompt + sampling.max_tokens,
            self.context,
            self.table.tables.max_tokens(self.num_pages) + 1,
        )
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos)}
        while True:
            token = next_token([*tokens, *new], VOCABULARY)
            new.append(token)
            if token in ends:
                return new, FinishReason.STOP
            if len(tokens) + len(new) >= limit:
                return new, FinishReason.LENGTH

    def check(self) -> None:
        """Run the scheduler's self-check. The test itself holds read and published pages."""
        elsewhere = {
            holder: [np.flatnonzero(self.pages.holds(holder))]
            for holder in (PageHolder.READ, PageHolder.PUBLICATION)
        }
        reserved = [holding.flat() for _, holding in self.landed]
        self.scheduler.check_idle({**elsewhere, PageHolder.REQUEST: reserved})

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.in_flight = self.loop.step(self.in_flight)
            self.check()

    @property
    def has_work(self) -> bool:
        busy = self.coming or self.tiers.busy or self.in_flight is not None
        return bool(self.scheduler.has_work or busy)

    def run(self) -> None:
        """Run until every request has ended."""
        self.run_until(lambda: not self.has_work)
        self.step()

    def run_until(self, condition: Callable[[], bool], max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"the condition never became true: {self.scheduler.queues()}")

    def end(self, finished: FinishedRequest | None) -> None:
        if finished is not None:
            assert finished.request.key not in self.finished, "a request ended twice"
            self.finished[finished.request.key] = finished.finish

    def abort(self, request: Request) -> None:
        finish = RequestEnd(FinishReason.ABORT, "cancelled")
        if self.coming.pop(request.key, None) is not None:
            self.end(FinishedRequest(request, finish))
            return
        self.end(self.scheduler.abort(request, finish))

    def assert_at_rest(self) -> None:
        self.role.calm_down()
        held = self.pages.by_holder()
        assert held["request"] == held["step"] == held["read"] == held["copy"] == 0
        assert held["free"] + held["cache"] == self.num_pages
        assert self.pages.num_evictable == held["cache"]
        assert self.table.num_free == self.table.num_slots
        assert self.scheduler.num_host_pages_used == 0


@dataclass(eq=False)
class RigRole:
    """A role that collects results, and checks the KV of finished chunks in its pages."""

    rig: Rig
    taken: Ints = field(default_factory=lambda: ints([]))
    polls: int = 0

    def poll(self) -> None:
        rig = self.rig
        self.polls += 1
        if rig.vandal:
            self._vandalise()
        for call in rig.before_poll:
            call()
        rig.tiers.poll()
        for finished in rig.scheduler.expire():
            rig.end(finished)

    def next_batch(self) -> ScheduleBatch | None:
        batch = self.rig.scheduler.next_batch()
        if batch is not None:
            self.rig.check_alone(batch)
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        rig = self.rig
        rig.note_pages()
        outcome = rig.scheduler.finish(batch, result)
        rows = zip(outcome.streams, outcome.requests, outcome.tokens, strict=True)
        for stream, number, token in rows:
            assert stream == 1 and int(number) not in rig.finished
            rig.tokens[int(number)].append(int(token))
        for (_, key), predicted in outcome.predicted:
            rig.predicted[key] = rig.predicted.get(key, NOTHING) + predicted
        for chunk in outcome.chunks:
            self._check_kv(chunk)
            rig.chunks.append(chunk)
        for finished in outcome.finished:
            rig.end(finished)

    def idle(self) -> None:
        self.rig.check()

    def _check_kv(self, chunk: ChunkDone) -> None:
        rig, slot = self.rig, chunk.request.slot
        if slot is None:
            return  # it ended with its first token
        live, size = rig.table.holding_of(slot), rig.page_size
        if not live.num_pages:
            return  # it was retracted
        for table, pages in enumerate(live.tables):
            at = np.arange(rig.table.tables.live_from(table, chunk.end) * size, chunk.end)
            kv = rig.runner.kv[pages[at // size], at % size]
            assert np.array_equal(kv, rig.table.tokens[slot, at])

    def calm_down(self) -> None:
        rig = self.rig
        assert (rig.runner.kv[self.taken] == _SCRIBBLE).all(), "a page was written after its time"
        rig.pages.drop(self.taken, PageHolder.READ)
        self.taken = self.taken[:0]

    def _vandalise(self) -> None:
        rig = self.rig
        self.calm_down()
        taken = rig.pages.allocate(rig.pages.num_free, PageHolder.READ)
        assert taken is not None
        rig.runner.kv[taken] = _SCRIBBLE
        keep = self.polls % 3 > 0  # a request that needs the very last page gets it eventually
        rig.pages.drop(taken[keep:], PageHolder.READ)
        self.taken = taken[:keep]
