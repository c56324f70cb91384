"""CPU of one hand-off on each side's engine thread.

Uses the real roles, scheduler, pages and prefix cache, with ports that only keep lists and a device
that computes nothing. Every call of the loop during the hand-off counts, including its share of
polling. The transfer thread, the frontend and the forward pass do not count.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from common.config import (
    DecodeConfig,
    EngineConfig,
    PrefillConfig,
    PrefixSharingConfig,
    SchedulerConfig,
)
from common.page_tables import PageTables
from common.request import Remaining, RequestSpec
from common.requests.namespace import UNNAMED
from common.requests.sampling import SamplingParams
from decode_node import engine as decode_engine
from decode_node.engine import DecodeRole
from engine.adapters.adapters import no_adapters
from engine.adapters.library import AdapterCache, AdapterLoader, no_shelf
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.limits import RequestLimits
from engine.batch.request import Ints, Request
from engine.core import CoreShape, EngineCore
from engine.grammar.grammar_verifier import SubprocessVerifier
from engine.grammar.guides import GrammarCache
from engine.kv_cache.kv_events import CacheEvents
from engine.loop.step_clock import StepClock
from engine.memory_release import MemoryOccupation
from engine.profiler import Profiler
from engine.scheduler.scheduler import Scheduler
from engine.update import WeightUpdater
from kvtransfer.messages import HandoffAdmitted, HandoffId, Prompt, SampledOutput
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FirstTokenEvent,
    GrantCommand,
    GrantedEvent,
    NodeCommand,
    NodeEvent,
    OpenCommand,
    OpenedEvent,
    ProducerUp,
    PublishCommand,
    ReadsEndedEvent,
)
from node.control.engine_control import CacheReports, EngineControl
from node.control.operations import EngineOperations
from node.messages import EngineMessage, FrontMessage, Placement, StepTokens, SubmitRequest
from node.sharing.prefixes import PrefixSharing
from node.sharing.reads import SharedReads
from node.sharing.weights import WeightSharing
from prefill_node import engine as prefill_engine
from prefill_node.engine import PrefillRole
from tools.bench.support.record import percentiles

PAGE_SIZE = 16
VOCABULARY = 32_000
PRODUCER, CONSUMER = 1, 2
ADDRESS = "127.0.0.1:50100"
SLOTS = 64
TOKEN = 7
WARM_UP = 50
_GUIDES = GrammarCache(
    Path(), VOCABULARY, (), SubprocessVerifier(Path(), VOCABULARY, ())
)  # no request has a grammar


@dataclass(frozen=True, slots=True)
class Load:
    """A load of `handoffs` prompts of `num_tokens` tokens without common prefixes, one by one.

    pool_handoffs: prompts that fit the pool. If fewer than `handoffs`, each prompt evicts another.
    """

    handoffs: int
    num_tokens: int
    pool_handoffs: int

    @property
    def prompt_pages(self) -> int:
        return -(-self.num_tokens // PAGE_SIZE)

    @property
    def num_pages(self) -> int:
        return self.prompt_pages * (self.pool_handoffs + 1)

    def prompts(self) -> Iterator[Ints]:
        random = np.random.default_rng(0)
        for _ in range(self.handoffs + WARM_UP):
            yield random.integers(1, VOCABULARY, self.num_tokens).astype(np.int32)


class _Front:
    """The engine thread's socket, without a peer."""

    def __init__(self) -> None:
        self.waiting: list[FrontMessage] = []
        self.ended = 0

    def take(self) -> Sequence[FrontMessage]:
        taken, self.waiting = self.waiting, []
        return taken

    def post(self, message: EngineMessage) -> None:
        match message:
            case StepTokens():
                self.ended += len(message.ended)

    def wait(self, timeout_s: float) -> None:
        return


class _Port:
    """The transfer thread's port, without a transfer thread."""

    def __init__(self) -> None:
        self.waiting: list[NodeEvent] = []
        self.posted: list[NodeCommand] = []

    def post(self, command: NodeCommand) -> None:
        self.posted.append(command)

    def take(self) -> list[NodeEvent]:
        taken, self.waiting = self.waiting, []
        return taken


class _Clock:
    """CPU seconds of this thread, by stage of the current hand-off."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}

    def run(self, stage: str, *calls: Callable[[], Any]) -> None:
        started = time.thread_time()
        for call in calls:
            call()
        self.stages.setdefault(stage, []).append(time.thread_time() - started)

    def row(self, side: str, load: Load, descriptors: int) -> dict[str, Any]:
        """Return a row in microseconds. The sum of all stages is the hand-off."""
        stages = {name: np.array(spent[WARM_UP:]) for name, spent in self.stages.items()}
        total = np.sum([spent for name, spent in stages.items() if name not in _BESIDE], axis=0)
        return {
            "side": side,
            "cache": "full" if load.pool_handoffs < load.handoffs else "has room",
            "tokens": load.num_tokens,
            "handoffs": load.handoffs,
            "descriptors": descriptors,
            "cpu_us": {"mean": round(total.mean() * 1e6, 1), **percentiles(total, 1e6, 1)},
            "stages_us": {
                name: round(float(np.median(spent)) * 1e6, 1) for name, spent in stages.items()
            },
        }


_BESIDE = ("its first decode step, its end",)  # shown, but not part of the hand-off


def producer(load: Load) -> dict[str, Any]:
    """Measure a prefill node's side: opened, granted, admitted, computed, published, dropped."""
    core = _core(load)
    port, front, clock = _Port(), _Front(), _Clock()
    runtime = _runtime(core, front, port)
    config = PrefillConfig.model_validate({"engine": {"model": "none"}})
    role = prefill_engine.make_role(_Engine(core), runtime, config)
    sampling = SamplingParams(max_tokens=64, seed=1, temperature=0.0, ignore_eos=True)
    descriptors = 0
    for number, prompt in enumerate(load.prompts(), start=1):
        id = HandoffId(CONSUMER, number, 1)
        spec = RequestSpec(request_id="request", token_ids=prompt.tobytes(), sampling=sampling)
        port.waiting = [OpenedEvent(number, id, UNNAMED, Remaining(60.0), Prompt(spec))]
        clock.run("open", role.poll)
        port.waiting = [GrantedEvent(number, 0)]
        clock.run("grant", role.poll)
        clock.run("admit, compute, publish", lambda: _step(role))
        published = [command for command in port.posted if isinstance(command, PublishCommand)]
        if [command.end for command in published if command.last] != [load.num_tokens]:
            raise RuntimeError(f"the producer did not publish its prompt in one chunk: {published}")
        descriptors = sum(len(command.pages) for command in published)
        port.posted.clear()
        port.waiting = [ClosedEvent(number, id, True, "")]
        clock.run("drop", role.poll)
    core.pages.check()
    return clock.row("producer", load, descriptors)


class _Engine:
    """See RoleEngine."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.page_bytes = core, PAGE_SIZE
        self.guides, self.adapters = _GUIDES, no_adapters(core.table)
        self.scheduler = lambda config, on_admit: _scheduler(core, on_admit)


@dataclass(frozen=True, slots=True)
class _Runtime:
    """See RoleRuntime."""

    channel: _Front
    control: EngineControl
    sharing: PrefixSharing
    port: _Port
    instance: int = CONSUMER


# Parts that no message of this benchmark uses, with the attributes that every turn reads.
_UPDATER = cast(WeightUpdater, SimpleNamespace(id=UNNAMED, whole=True))
_MEMORY = cast(MemoryOccupation, SimpleNamespace(unused=False))
_PROFILER = cast(Profiler, SimpleNamespace(poll=lambda: None))


def _runtime(core: EngineCore, front: "_Front", port: "_Port") -> "_Runtime":
    shared = SharedReads(CONSUMER, core.cache, port)
    weights = WeightSharing(
        _UPDATER,
        shared,
        cache=core.cache,
        pages=core.pages,
        pool=torch.empty(1, PAGE_SIZE, dtype=torch.uint8),
        port=port,
        notify=lambda: None,
    )
    control = EngineControl(
        front,
        pages_by_holder=core.pages.by_holder,
        clock=StepClock(first_step_s=1.0),
        cache=CacheReports(CacheEvents(core.cache), front.post),
        adapters=AdapterLoader(no_shelf(), AdapterCache(0, 0)),
        operations=EngineOperations(_UPDATER, weights, _MEMORY, _PROFILER),
        links=shared.producers,
    )
    sharing = PrefixSharing(
        PrefixSharingConfig(),
        shared,
        port,
        core=core,
        page_bytes=PAGE_SIZE,
        weights=weights,
    )
    return _Runtime(front, control, sharing, port)


def consumer(load: Load) -> dict[str, Any]:
    """Measure a decode node's side: submitted, opened, granted, first token, completed, joined."""
    core = _core(load)
    port, front, clock = _Port(), _Front(), _Clock()
    runtime = _runtime(core, front, port)
    config = DecodeConfig.model_validate(
        {"engine": {"model": "none"}, "transfer": {"canary_tokens": 0}}
    )
    role = decode_engine.make_role(_Engine(core), runtime, config)
    port.waiting = [ProducerUp(PRODUCER, ADDRESS, "cma", 5.0, PAGE_SIZE)]
    role.poll()
    # Two tokens: the hand-off's, and one of a decode step, which ends the request.
    sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0, ignore_eos=True)
    descriptors = 0
    for number, prompt in enumerate(load.prompts()):
        spec = RequestSpec(request_id="request", token_ids=prompt.tobytes(), sampling=sampling)
        placed = Placement((ADDRESS,))
        front.waiting = [SubmitRequest(1, number, spec, Remaining(60.0), placed)]
        clock.run("submit, open, grant", role.poll)
        opened, granted = port.posted
        if not isinstance(opened, OpenCommand) or not isinstance(granted, GrantCommand):
            raise RuntimeError(f"the consumer did not open and grant: {port.posted}")
        descriptors = len(granted.destination_pages)
        port.posted.clear()
        port.waiting = [HandoffAdmitted(opened.id, load.num_tokens, 0)]
        clock.run("admitted", role.poll)
        port.waiting = [FirstTokenEvent(opened.id, SampledOutput(TOKEN))]
        clock.run("first token", role.poll)
        # The protocol reports both together: reads end with the attempt.
        port.waiting = [CompletedEvent(opened.id), ReadsEndedEvent(opened.id)]
        clock.run("held, reads ended, join", role.poll)
        clock.run(_BESIDE[0], lambda: _step(role))
        if front.ended != number + 1:
            raise RuntimeError("a request did not end with its second token")
    core.pages.check()
    return clock.row("consumer", load, descriptors)


def plain(load: Load) -> dict[str, Any]:
    """Measure the scheduling of the same prompt's prefill without a hand-off."""
    core = _core(load)
    clock = _Clock()
    scheduler = _scheduler(core, lambda request, pages: None)
    sampling = SamplingParams(max_tokens=1, seed=1, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(load.prompts()):
        spec = RequestSpec(request_id="request", token_ids=prompt.tobytes(), sampling=sampling)
        request = Request.of(spec, key=number, deadline=time.monotonic() + 60.0, arrived=0.0)
        clock.run("add", partial(scheduler.add, request))
        clock.run("admit, compute, end", lambda: _step(scheduler))
    core.pages.check()
    return clock.row("plain prefill", load, 0)


def _core(load: Load) -> EngineCore:
    context, tables = load.num_tokens + PAGE_SIZE, PageTables(PAGE_SIZE)
    return EngineCore.make(
        EngineConfig(model="none", scheduler=SchedulerConfig(max_running_requests=SLOTS)),
        CoreShape(tables, context, load.num_pages, chunk_tokens=load.num_tokens),
        RequestLimits(context, VOCABULARY, tables, load.num_pages),
    )


def _scheduler(core: EngineCore, on_admit: Callable[[Any, Any], None]) -> Scheduler:
    return Scheduler(SchedulerConfig(max_running_requests=SLOTS), core, on_admit)


def _step(role: PrefillRole | DecodeRole | Scheduler) -> None:
    """Run one turn of the loop on a device that completes immediately."""
    batch: ScheduleBatch | None = role.next_batch()
    if batch is None:
        raise RuntimeError("there was nothing to launch")
    tokens = np.where(batch.samples, TOKEN, -1).astype(np.int32)
    role.finish(batch, BatchResult(tokens))
