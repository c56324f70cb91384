"""CPU of one hand-off on each side's engine thread.

Uses the real roles, scheduler, pages and prefix cache, with ports that only keep lists and a device
that computes nothing. Every call of the loop during the hand-off counts, including its share of
polling. The transfer thread, the frontend and the forward pass do not count.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from common.config import (
    DecodeConfig,
    EngineConfig,
    NodeConfig,
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
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.core import CoreShape, EngineCore
from engine.kv_cache.kv_events import CacheEvents
from engine.loop.step_clock import StepClock
from engine.scheduler.scheduler import Scheduler
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
from node.control.engine_control import CacheReports, EngineControl, ReportSources
from node.messages import EngineMessage, FrontMessage, Placement, StepTokens, SubmitRequest
from node.sharing.prefixes import PrefixSharing
from node.sharing.reads import SharedReads
from prefill_node import engine as prefill_engine
from prefill_node.engine import PrefillRole
from simulation.node.parts import NoAdapters, NoGrammars, SimOperations
from tools.bench.support.record import percentiles, say, show

PAGE_SIZE = 16
PROMPT_TOKENS = 1024
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
VOCABULARY = 32_000
PRODUCER, CONSUMER = 1, 2
ADDRESS = "127.0.0.1:50100"
TOKEN = 7
WARM_UP = 50
GOAL_US = 100.0
_SCHEDULER = SchedulerConfig(max_running_requests=64)
_BESIDE = "its first decode step, its end"  # shown, but not part of the hand-off


def measure(handoffs: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each side, with a pool that has room and with one that is full."""
    sides = {"producer": _producer, "consumer": _consumer, "plain prefill": _plain}
    pools = {"has room": handoffs + WARM_UP, "full": max(1, handoffs // 20)}
    rows = []
    for side, run in sides.items():
        for cache, pool_prompts in pools.items():
            core = _core(pool_prompts)
            stages, descriptors = run(core, _specs(handoffs + WARM_UP))
            core.pages.check()
            rows.append(_row(side, cache, stages, descriptors))
    show(rows)
    worst = {row["side"]: row["cpu_us"]["p50"] for row in rows if row["cache"] == "full"}
    own = round(worst["producer"] - worst["plain prefill"], 1)
    say(f"CPU us p50 with a full cache (goal {GOAL_US:g} per hand-off and side): {worst}")
    say(f"producer, beyond what scheduling a prefill costs anyway: {own}")
    return rows, {"goal_us": GOAL_US, "cpu_us_p50": worst, "producer_beyond_prefill_us": own}


Stages = dict[str, list[float]]  # CPU seconds of this thread by stage, for each hand-off


def _row(side: str, cache: str, stages: Stages, descriptors: int) -> dict[str, Any]:
    """Return a row in microseconds. The sum of all stages is the hand-off."""
    spent = {name: np.array(seconds[WARM_UP:]) * 1e6 for name, seconds in stages.items()}
    total = np.sum([us for name, us in spent.items() if name != _BESIDE], axis=0)
    return {
        "side": side,
        "cache": cache,
        "tokens": PROMPT_TOKENS,
        "handoffs": len(total),
        "descriptors": descriptors,
        "cpu_us": {"mean": round(total.mean(), 1), **percentiles(total, digits=1)},
        "stages_us": {name: round(float(np.median(us)), 1) for name, us in spent.items()},
    }


def _specs(count: int) -> Iterator[RequestSpec]:
    """Yield requests without common prefixes.

    Their two tokens are the hand-off's, and one of a decode step, which ends the request.
    """
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0, ignore_eos=True)
    for _ in range(count):
        prompt = random.integers(1, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
        yield RequestSpec(request_id="request", token_ids=prompt.tobytes(), sampling=sampling)


class _Clock:
    """Measures the stages of hand-offs."""

    def __init__(self) -> None:
        self.stages: Stages = defaultdict(list)

    def run(self, stage: str, call: Callable[[], object]) -> None:
        started = time.thread_time()
        call()
        self.stages[stage].append(time.thread_time() - started)


def _producer(core: EngineCore, specs: Iterable[RequestSpec]) -> tuple[Stages, int]:
    """Measure a prefill node's side: opened, granted, admitted, computed, published, dropped."""
    clock, descriptors = _Clock(), 0
    config = PrefillConfig.model_validate({"engine": {"model": "none"}})
    role, port, _ = _role(prefill_engine.make_role, core, config)
    for number, spec in enumerate(specs, start=1):
        id = HandoffId(CONSUMER, number, 1)
        port.waiting = [OpenedEvent(number, id, UNNAMED, Remaining(60.0), Prompt(spec))]
        clock.run("open", role.poll)
        port.waiting = [GrantedEvent(number, 0)]
        clock.run("grant", role.poll)
        clock.run("admit, compute, publish", lambda: _step(role))
        published = [command for command in port.posted if isinstance(command, PublishCommand)]
        if [command.end for command in published if command.last] != [PROMPT_TOKENS]:
            raise RuntimeError(f"the producer did not publish its prompt in one chunk: {published}")
        descriptors = sum(len(command.pages) for command in published)
        port.posted.clear()
        port.waiting = [ClosedEvent(number, id, True, "")]
        clock.run("drop", role.poll)
    return clock.stages, descriptors


def _consumer(core: EngineCore, specs: Iterable[RequestSpec]) -> tuple[Stages, int]:
    """Measure a decode node's side: submitted, opened, granted, first token, completed, joined."""
    clock, descriptors = _Clock(), 0
    fields = {"engine": {"model": "none"}, "transfer": {"canary_tokens": 0}}
    role, port, front = _role(decode_engine.make_role, core, DecodeConfig.model_validate(fields))
    port.waiting = [ProducerUp(PRODUCER, ADDRESS, "cma", 5.0, PAGE_SIZE)]
    role.poll()
    for number, spec in enumerate(specs):
        placed = Placement((ADDRESS,))
        front.waiting = [SubmitRequest(1, number, spec, Remaining(60.0), placed)]
        clock.run("submit, open, grant", role.poll)
        opened, granted = port.posted
        if not isinstance(opened, OpenCommand) or not isinstance(granted, GrantCommand):
            raise RuntimeError(f"the consumer did not open and grant: {port.posted}")
        descriptors = len(granted.destination_pages)
        port.posted.clear()
        port.waiting = [HandoffAdmitted(opened.id, PROMPT_TOKENS, 0)]
        clock.run("admitted", role.poll)
        port.waiting = [FirstTokenEvent(opened.id, SampledOutput(TOKEN))]
        clock.run("first token", role.poll)
        # The protocol reports both together: reads end with the attempt.
        port.waiting = [CompletedEvent(opened.id), ReadsEndedEvent(opened.id)]
        clock.run("held, reads ended, join", role.poll)
        clock.run(_BESIDE, lambda: _step(role))
        if front.ended != number + 1:
            raise RuntimeError("a request did not end with its second token")
    return clock.stages, descriptors


def _plain(core: EngineCore, specs: Iterable[RequestSpec]) -> tuple[Stages, int]:
    """Measure the scheduling of the same prompt's prefill without a hand-off."""
    clock = _Clock()
    scheduler = Scheduler(_SCHEDULER, core, lambda request, pages: None)
    for number, spec in enumerate(specs):
        one_token = replace(spec, sampling=replace(spec.sampling, max_tokens=1))
        request = Request.of(one_token, key=number, deadline=math.inf, arrived=0.0)
        clock.run("add", partial(scheduler.add, request))
        clock.run("admit, compute, end", lambda: _step(scheduler))
    return clock.stages, 0


def _core(pool_prompts: int) -> EngineCore:
    """Return a core without a device. With fewer pages than prompts, each evicts another."""
    context, tables = PROMPT_TOKENS + PAGE_SIZE, PageTables(PAGE_SIZE)
    num_pages = PROMPT_PAGES * (pool_prompts + 1)
    return EngineCore.make(
        EngineConfig(model="none", scheduler=_SCHEDULER),
        CoreShape(tables, context, num_pages, chunk_tokens=PROMPT_TOKENS),
        RequestLimits(context, VOCABULARY, tables, num_pages),
    )


def _step(role: PrefillRole | DecodeRole | Scheduler) -> None:
    """Run one turn of the loop on a device that completes immediately."""
    batch: ScheduleBatch | None = role.next_batch()
    if batch is None:
        raise RuntimeError("there was nothing to launch")
    tokens = np.where(batch.samples, TOKEN, -1).astype(np.int32)
    role.finish(batch, BatchResult(tokens))


# A role without other threads.


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


def _role(
    make_role: Callable[..., Any], core: EngineCore, config: NodeConfig
) -> tuple[Any, _Port, _Front]:
    """Return a role of the product without a device, its port and its front."""
    port, front = _Port(), _Front()
    shared = SharedReads(CONSUMER, core.cache, port)
    control = EngineControl(
        front,
        sources=ReportSources(StepClock(first_step_s=1.0), core.pages.by_holder, shared.producers),
        cache=CacheReports(CacheEvents(core.cache), front.post),
        adapters=NoAdapters(),
        operations=SimOperations(),
    )
    sharing = PrefixSharing(
        PrefixSharingConfig(), shared, port, core=core, page_bytes=PAGE_SIZE, weights=None
    )
    engine = SimpleNamespace(
        core=core,
        page_bytes=PAGE_SIZE,
        guides=NoGrammars(),
        adapters=NoAdapters(),
        scheduler=lambda config, on_admit: Scheduler(_SCHEDULER, core, on_admit),
    )
    runtime = SimpleNamespace(
        channel=front, control=control, sharing=sharing, port=port, instance=CONSUMER
    )
    return make_role(engine, runtime, config), port, front
