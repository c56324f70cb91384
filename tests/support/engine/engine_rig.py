"""An engine without a model: the product's core, scheduler and loop over a fake backend.

Between steps the role allocates every free page as a transfer would, overwrites it, and mostly
keeps one page until the next step. So a request that reads a released page, or a cached page of
another namespace, gets wrong tokens, and late writes are detected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.page_tables import PageTables
from common.request import NOT_PREDICTED, PredictionUsage
from common.requests.namespace import Namespace, as_bytes
from common.requests.sampling import SamplingParams
from decode_node.state import PageReservations
from engine.batch.batch import BatchResult, Ints, LaunchedBatch, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.core import CoreShape, EngineCore
from engine.kv_cache.pages import AscendingRuns, PageHolder
from engine.loop.loop import EventLoop
from engine.offload.cache_tiers import CacheTiers
from engine.offload.page_files import PageFiles
from engine.offload.page_records import HEADER_BYTES, RECORD_BYTES, version_of
from engine.scheduler.scheduler import ChunkDone, FinishedRequest, Scheduler
from engine.scheduler.split_prefill import GroupLimits
from engine.speculative import Speculator
from kvtransfer.messages import HandoffId
from tests.support.engine.fake_backend import (
    VOCABULARY,
    FakeBackend,
    FakeRunner,
    LateFiles,
    next_token,
    state_of,
)
from tests.support.engine.lifo_pages import LifoFreeList
from tests.support.fake_clock import FakeClock
from tests.support.specs import make_request

NUM_LAYERS = 8
CHUNK_TOKENS = 2048  # if the configuration does not limit chunks
_SCRIBBLE = -7
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a rig, and its faults.

    Attributes:
        windows: window of each table.
        tier_pages, file_pages: pages of the offload tiers in host memory and in `disk_dir`.
        namespaces: namespace of each file slot. None: a new directory.
        vandal: overwrite free pages between steps.
        poison: token that makes logits NaN.
        token_s: measured seconds of a prompt token through all layers. None: not measured.
    """

    num_pages: int = 64
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    state_pages: int = 0
    context_length: int = 1024
    swap_pages: int = 64
    tier_pages: int = 0
    disk_dir: Path | None = None
    file_pages: int = 0
    namespaces: dict[int, Namespace | None] | None = None
    prefix_cache: bool = True
    max_cached_pages: int = 0
    eos: tuple[int, ...] = ()
    lifo: bool = True
    vandal: bool = True
    poison: int | None = None
    speculator: Speculator | None = None
    token_s: float | None = 0.001


class Rig:
    """One engine. `step` runs one iteration of the loop and checks all page holders.

    Args:
        options: fields of Options, and of SchedulerConfig.
    """

    def __init__(self, **options: Any) -> None:
        self.given = options
        own = {name: options[name] for name in Options.__slots__ if name in options}
        steps = {name: value for name, value in options.items() if name not in own}
        self.options = given = Options(**own)
        self.config = SchedulerConfig(**{"max_running_requests": 8, **steps})
        self.page_size, self.num_pages = given.page_size, given.num_pages
        tables = PageTables(given.page_size, given.windows, given.state_pages)
        chunk = self.config.chunked_prefill_tokens or CHUNK_TOKENS
        shape = CoreShape(
            tables,
            given.context_length,
            given.num_pages,
            given.swap_pages,
            given.tier_pages,
            None if chunk < 0 else max(chunk, given.page_size),
        )
        self.backend = FakeBackend(shape)
        self.copier, self.store = self.backend.copier, self._files()
        self.clock = FakeClock()
        cache = CacheConfig(
            prefix_cache=given.prefix_cache, max_cached_pages=given.max_cached_pages
        )
        self.core = EngineCore.make(
            EngineConfig(model="fake", cache=cache, scheduler=self.config),
            shape,
            RequestLimits(
                given.context_length, VOCABULARY, tables, given.num_pages, eos_token_ids=given.eos
            ),
            self.copier,
            store=self.store,
            speculator=given.speculator,
            free_list=LifoFreeList if given.lifo else AscendingRuns,
            clock=self.clock,
        )
        self.table, self.pages = self.core.table, self.core.pages
        self.cache = self.core.cache
        self.admitted: list[tuple[int, Ints]] = []
        self.scheduler = Scheduler(self.config, self.core, self._on_admit)
        self.token_s: float | None = given.token_s
        if self.config.split_prefill_ms:
            limit_s = self.config.split_prefill_ms / 1000
            limits = GroupLimits(limit_s, NUM_LAYERS, lambda: self.token_s)
            self.scheduler.split_prefills(limits)
        self.reservations = PageReservations(
            scheduler=self.scheduler,
            pages=self.pages,
            cache=self.cache,
            tables=tables,
            tiers=self.core.tiers,
            page_bytes=1,
        )
        self.coming: dict[int, Request] = {}  # by key
        self.role = RigRole(self)
        self.runner = FakeRunner(self.table, self.backend, poison=given.poison)
        self.loop = EventLoop(
            self.role,
            self.runner,
            overlap=self.config.overlap_schedule,
            overlap_prefills=self.config.overlap_prefills,
        )
        self.in_flight: LaunchedBatch | None = None
        self.tokens: dict[int, list[int]] = {}
        self.predicted: dict[int, PredictionUsage] = {}  # of requests with a prediction
        self.finished: dict[int, RequestEnd] = {}
        self.chunks: list[ChunkDone] = []
        self.requests: dict[int, Request] = {}
        self.sent: list[Request] = []
        self.came_with: dict[int, Ints] = {}  # the tokens of a recomputed request have grown
        self.before_poll: list[Callable[[], None]] = []
        self.landed: list[tuple[Request, PageHolding]] = []
        self.trials: list[int] = []  # keys of quarantined requests, one for each step alone

    def _files(self) -> LateFiles | None:
        given = self.options
        if given.disk_dir is None:
            return None
        memory = self.backend.host_kv.view(np.uint8)
        files = PageFiles(
            given.disk_dir,
            memory,
            version=version_of({}, b""),
            num_bytes=HEADER_BYTES + given.file_pages * (memory.shape[1] + RECORD_BYTES),
        )
        return LateFiles(files, self.backend, {} if given.namespaces is None else given.namespaces)

    def again(self, **changes: Any) -> "Rig":
        """Return the engine's next process, on the same files."""
        known = {} if self.store is None else {"namespaces": self.store.whose}
        return Rig(**{**self.given, **known, **changes})

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
            request.quarantine_after(engine_crashes=1)
        self.requests[key] = request
        self.came_with[key] = request.token_ids
        self.tokens[key] = []
        return request

    def stopping_prompt(self, rest: Sequence[int], after: int) -> list[int]:
        """Return a prompt whose token number `after` (from 1) is EOS, with no other before it.

        Args:
            rest: the prompt after its first token.
        """
        for first in range(90):
            tokens, reason = self.expected(self.request([first, *rest], 100))
            if reason is FinishReason.STOP and len(tokens) == after:
                return [first, *rest]
        raise AssertionError("no such prompt")

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        request = self.request(prompt, max_tokens, **options)
        self.scheduler.add(request)
        self.sent.append(request)
        return request

    def come(self, request: Request) -> None:
        """Add a request after its prefix is loaded from the offload tier."""

        def add() -> None:
            if self.coming.pop(request.key, None) is not None:
                self.scheduler.add(request)

        self.sent.append(request)
        self.coming[request.key] = request
        room = self.scheduler.free_capacity().num_pages
        wanted = request.token_ids[:-1], request.namespace
        if self.core.tiers is None or not self.tiers.load(*wanted, room, add):
            add()

    def land(self, request: Request) -> bool:
        """Reserve a request's pages like a decode node, and write KV of all tokens but the last.

        Keeps the request until `join_landed`. Returns False if there is no capacity.
        """
        if self.scheduler.free_capacity().num_slots <= 0:
            return False
        token_ids, handoff = request.token_ids[:-1], HandoffId(0, request.key, 1)
        reserved = self.reservations.reserve(handoff, token_ids, request.namespace)
        if reserved is None:
            return False
        holding = reserved.holding
        for pages in holding.tables:
            fresh = np.isin(pages, reserved.fresh)
            self.runner.kv[pages[fresh]] = np.resize(token_ids, (len(pages), self.page_size))[fresh]
        self.runner.kv[holding.state, :2] = state_of(token_ids)
        self.reservations.reads_ended(handoff)
        self._check_whose(request, holding.flat())
        self.landed.append((request, holding))
        self.sent.append(request)
        self.scheduler.kept.slots = len(self.landed)
        return True

    def join_landed(self) -> None:
        for request, holding in self.landed:
            assert self.scheduler.join(request, holding)
        self.landed.clear()
        self.scheduler.kept.slots = 0

    def note_pages(self) -> None:
        """Record the pages that running requests write, including pages granted after admission."""
        for request in self.requests.values():
            if request.slot is not None:
                pages = self.table.pages_of(request.slot).tolist()
                self.backend.written_in |= dict.fromkeys(pages, request.namespace)

    def _on_admit(self, request: Request, holding: PageHolding) -> None:
        pages = holding.flat()
        self._check_whose(request, pages)
        self.admitted.append((request.key, pages))

    def check_alone(self, batch: ScheduleBatch) -> None:
        """Check that a quarantined request runs alone until it has enough tokens."""
        keys = self.table.origin_request[batch.slots].tolist()
        has = {key: len(self.came_with[key]) + len(self.tokens[key]) for key in keys}
        kept_apart = [key for key in keys if has[key] < self.requests[key].alone_until]
        if kept_apart:
            assert kept_apart == keys
            assert self.in_flight is None
        self.trials += kept_apart
        running_alone = self.scheduler.running_alone
        assert [running_alone.key] == keys if running_alone is not None else not kept_apart

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
            self.options.context_length,
            self.table.tables.max_tokens(self.num_pages) + 1,
        )
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.options.eos)}
        while True:
            token = next_token([*tokens, *new], VOCABULARY)
            new.append(token)
            if token in ends:
                return new, FinishReason.STOP
            if len(tokens) + len(new) >= limit:
                return new, FinishReason.LENGTH

    def check_answers(self, *requests: Request) -> None:
        """Check that these requests, or all, ended as expected. Cancelled ones may end early."""
        for request in requests or self.sent:
            reported, ended = self.tokens[request.key], self.finished[request.key].reason
            tokens, reason = self.expected(request)
            if ended is FinishReason.ABORT:
                tokens, reason = tokens[: len(reported)], ended
            assert (reported, ended) == (tokens, reason)

    def complete(self, *requests: Request) -> None:
        """Run until every request has ended.

        Check that these, or all, ended as expected, and that nothing is left.
        """
        self.run()
        self.check_answers(*requests)
        self.assert_at_rest()

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
    def tiers(self) -> CacheTiers:
        """Return the offload tiers. The rig must have some."""
        assert self.core.tiers is not None
        return self.core.tiers

    @property
    def has_work(self) -> bool:
        busy = self.core.tiers is not None and self.core.tiers.busy
        return bool(self.scheduler.has_work or self.coming or busy or self.in_flight is not None)

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
            request, reason = finished.request, finished.finish.reason
            is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
            num_generated = request.spec.num_generated + len(self.tokens[request.key])
            assert finished.num_generated == (num_generated if is_complete else 0)

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
        if rig.options.vandal:
            self._vandalise()
        for call in rig.before_poll:
            call()
        if rig.core.tiers is not None:
            rig.core.tiers.poll()
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
            rig.predicted[key] = rig.predicted.get(key, NOT_PREDICTED) + predicted
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
        keep = self.polls % 3 > 0  # a request that needs the last page gets it eventually
        rig.pages.drop(taken[keep:], PageHolder.READ)
        self.taken = taken[:keep]
