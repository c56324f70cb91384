"""The engine process of a decode node: its role, and the assembly of the role from an engine.

The queues of a request:

    prepared --(a producer is paired)--> prealloc queue --grant--> transfer queue --held--> running
        |           ^                          |  failed: next, then local  |
        |---> unpaired (producers just lost) <-+----------------------------|
        `--(colocated, short, no producer)-----+----------------------------+--> waiting queue

This node is responsible for a request from submission to the last token (active_requests.py), and
can always prefill it itself after a failed hand-off. PrefillPlacement places requests,
IncomingHandoffs tracks hand-offs, and the scheduler runs what is computed here. None of them knows
streams or sockets: the router is behind EngineControl and the outbox, other nodes are behind a
TransferPort. In outgoing migrations this node is the producer (outgoing_migrations.py).
"""

import math
import time
from collections.abc import Mapping

from common.config import DecodeConfig, EngineConfig
from common.distribution import HistogramCounts
from common.errors import ConfigError
from common.queueing import PriorityClass, QueueBacklog
from common.requests.namespace import WeightsId
from common.requests.timeline import RequestTrace, RequestTraces
from decode_node.active_requests import ActiveRequests, DecodeCounters, TokenOutbox
from decode_node.admission import PrefixLocations, RequestAdmission
from decode_node.canary import STREAM, Canary
from decode_node.handoffs import FailedHandoff, IncomingHandoffs
from decode_node.outgoing_migrations import OutgoingMigrations
from decode_node.placement import PrefillPlacement
from decode_node.queues import DecodeQueues, PausedQueue, PrefixFetchQueue, UnpairedQueue
from decode_node.state import DecodeState, PageReservations
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.limits import TokenBudget
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.kv_cache.pages import PageHolder
from engine.scheduler.scheduler import ChunkDone
from kvtransfer.messages import HandoffAdmitted
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailedEvent,
    FirstTokenEvent,
    GrantedEvent,
    OpenedEvent,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
    SetWeightVersion,
)
from node.control.commands import PAUSED
from node.messages import (
    CancelSubmitted,
    FrontMessage,
    QuarantineStarted,
    RouterStreamClosed,
    SubmitRequest,
)
from node.queues import AdapterQueue, GrammarQueue, PreparationStages, SchedulerQueue, TierLoadQueue
from node.request_state import Claim, RequestStage
from node.role_parts import RoleEngine, RoleRuntime
from node.sharing.prefixes import PrefixSharing
from node.timings import RequestHistory, RequestTimings

_HANDOFF_STAGES = (RequestStage.UNPAIRED, RequestStage.PREALLOC, RequestStage.TRANSFER)


class DecodeRole:
    """A decode node. Engine thread only."""

    def __init__(
        self,
        runtime: RoleRuntime,
        *,
        queues: DecodeQueues,
        active: ActiveRequests,
        admission: RequestAdmission,
        placement: PrefillPlacement,
        handoffs: IncomingHandoffs,
        migrations: OutgoingMigrations,
        canary: Canary,
    ) -> None:
        self.scheduler = queues.scheduled.scheduler
        self._port = runtime.port
        self._control = runtime.control
        self._sharing = runtime.sharing
        self._queues = queues
        self._active = active
        self._admission = admission
        self._placement = placement
        self._handoffs = handoffs
        self._migrations = migrations
        self._canary = canary
        self._reported_quarantine: Request | None = None

    def poll(self) -> None:
        now = time.monotonic()
        # Retry after all events are handled, so that lost producers are known.
        for failed in self._handle_events(now):
            self._placement.retry(failed)
        self._sharing.poll()
        for state, ending in self._queues.expired(now):
            state.close(ending)
        self._control.poll(self, self._handle_message)
        self._placement.place_ready(now)
        if self._migrations.in_progress:
            self._migrations.poll(now)
        self._handoffs.join()
        self._handoffs.grant(now)
        self._active.outbox.flush()

    def next_batch(self) -> ScheduleBatch | None:
        if self._launch_waits_s > 0:
            return None
        batch = self.scheduler.next_batch()
        if self.scheduler.running_alone is not self._reported_quarantine:
            self._report_quarantine(self.scheduler.running_alone)
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome, outbox = self.scheduler.finish(batch, result), self._active.outbox
        outbox.tokens(outcome.streams, outcome.requests, outcome.tokens)
        for origin, logprobs in outcome.logprobs:
            self._active.send_logprobs(origin, logprobs)
        for origin, predicted in outcome.predicted:
            outbox.predicted(origin, predicted)
        for chunk in outcome.chunks:
            self._computed(chunk)
        now = time.monotonic()
        self._queues.scheduled.backlog.tick(now)
        self._sharing.sources.computing.tick(now)
        for finished in outcome.finished:
            if finished.corrupt_prefix is not None:
                self._sharing.corrupt_prefixes.found(finished.corrupt_prefix)
            state = self._active.find(finished.request)
            if state is not None:
                self._admission.note_length(state, finished.num_generated, now)
                state.close(finished.finish)
        outbox.flush()

    def _computed(self, chunk: ChunkDone) -> None:
        """Report a computed chunk. Only the first prefill of a retracted request counts."""
        request, num_left = chunk.request, len(chunk.request.token_ids) - chunk.end
        state = self._active.find(request)
        if state is not None and chunk.first_token is not None:
            timings = state.timings
            if timings.queued and not timings.prefilled:
                timings.prefilled = time.monotonic()
                timings.note_first_token(timings.prefilled)
        self._queues.scheduled.backlog.serve(request.key, num_left)
        self._sharing.sources.computing.serve(request.key, num_left)
        if chunk.first_token is not None:
            self._active.outbox.begin(request.origin, request.cached_tokens)
        if chunk.prompt_logprobs is not None:
            self._active.outbox.prompt_logprobs(request.origin, chunk.prompt_logprobs)

    def idle(self) -> None:
        self._control.wait_for_work(self, self.check_leaks, self._launch_waits_s or math.inf)

    @property
    def _launch_waits_s(self) -> float:
        return self._handoffs.launch_waits_s(time.monotonic(), ahead=self.scheduler.computes)

    def check_leaks(self) -> None:
        """Raise EngineFault if a page or slot has no live holder."""
        joining = [state.attempt.reserved.holding.flat() for state in self._queues.transfer]
        reads = [*self._handoffs.reads(), *self._sharing.reads()]
        leaving = (each.exported for each in self._migrations.in_progress.values())
        exported = [*leaving, *self._sharing.exported()]
        self.scheduler.check_idle(
            {PageHolder.REQUEST: joining, PageHolder.READ: reads, PageHolder.PUBLICATION: exported}
        )

    # Events of the transfer thread

    def _handle_events(self, now: float) -> list[FailedHandoff]:
        failed: list[FailedHandoff | None] = []
        events = self._port.take()
        if self._canary.unchecked or ProducerUp in map(type, events):
            events = self._canary.admitted(events, now)
        for event in events:
            match event:
                case HandoffAdmitted():
                    self._handoffs.admitted(event)
                case FirstTokenEvent():
                    failed.append(self._handoffs.first_token(event))
                case _ if self._sharing.handle(event):
                    continue
                case ProducerUp():
                    self._active.counters.count("link_changes/up")
                case ProducerDown(address=address):
                    self._queues.unpaired.lost(address, now)
                    self._active.counters.count("link_changes/down")
                case CompletedEvent():
                    self._handoffs.completed(event)
                case FailedEvent():
                    failed.append(self._handoffs.failed(event))
                case ReadsEndedEvent():
                    self._handoffs.reads_ended(event)
                case OpenedEvent():
                    self._migrations.opened(event)
                case GrantedEvent():
                    self._migrations.granted(event)
                case ClosedEvent():
                    self._migrations.closed(event)
        return [each for each in failed if each is not None]

    @property
    def busy(self) -> bool:
        migrations = self._migrations
        lingers = migrations.in_progress or time.monotonic() < migrations.lingers_until
        return bool(self._active or self._handoffs.reads() or lingers or self._sharing.busy)

    def queues(self) -> dict[str, int]:
        return {**self._queues.lengths(), "migrating": len(self._migrations.in_progress)}

    def waiting_by_class(self) -> Mapping[PriorityClass, int]:
        return self.scheduler.waiting_by_class() + self._queues.prealloc.by_class()

    def handoffs(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [state.describe(now) for state in self._active if state.stage in _HANDOFF_STAGES]

    def counters(self) -> dict[str, int]:
        own = self._active.counters.totals()
        return {**self.scheduler.counters(), **own, **self._sharing.counters()}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {**self._active.counters.distributions(), **self.scheduler.distributions()}

    def backlogs(self) -> dict[str, QueueBacklog]:
        prompts, pages = self._queues.scheduled.backlog, self._queues.prealloc.backlog
        return {"prompts": prompts.backlog, "pages": pages.backlog}

    def abort(self, request_id: str) -> int:
        doomed = [each for each in self._active if each.request.spec.request_id == request_id]
        for state in doomed:
            _abort(state, "aborted by an operator")
        return len(doomed)

    def abort_all(self) -> int:
        doomed = tuple(self._active)
        for state in doomed:
            _abort(state, PAUSED)
        return len(doomed)

    def release_kv(self) -> bool:
        self._migrations.cancel_all("this node is paused")
        for failed in self._handoffs.cancel_all("this node is paused"):
            self._placement.retry(failed)
        if self._migrations.in_progress:
            return False
        self.scheduler.requeue_all()
        return not self._sharing.fetches.busy

    def update_waiting_requests(self) -> None:
        for state in self._active:
            state.request.compute_with(self._control.weights)

    def set_weight_version(self, weights: WeightsId) -> None:
        self._port.post(SetWeightVersion(weights))

    def explain(self, request_id: str) -> RequestTraces:
        return self._active.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._active.flights(num_ended)

    def _handle_message(self, message: FrontMessage) -> None:
        match message:
            case SubmitRequest():
                self._admission.submit(message)
            case CancelSubmitted(stream, number):
                state = self._active.get((stream, number))
                if state is not None:
                    _abort(state, "cancelled")
            case RouterStreamClosed(stream):
                for state in self._active:
                    if state.origin[0] == stream:
                        _abort(state, "cancelled")

    def _report_quarantine(self, request: Request | None) -> None:
        """Report a quarantined request, before the launch of the step that may crash the engine."""
        self._reported_quarantine = request
        self._control.notify(
            QuarantineStarted(*request.origin) if request else QuarantineStarted(0, 0)
        )


def _abort(state: DecodeState, reason: str) -> None:
    """End a request early. If a launched step contains it, the result of that step ends it."""
    end = RequestEnd(FinishReason.ABORT, reason)
    if state.queue is not None and state.queue.remove(state, end):
        state.close(end)


def wants(config: EngineConfig) -> EngineConfig:
    """Return the configuration unchanged: a decode node uses all parts of an engine."""
    return config


def check(engine: RoleEngine) -> None:
    """Raise ConfigError if a decode node cannot serve the engine's model."""
    if not engine.core.limits.generates:
        raise ConfigError("the model has no language model head: only prefill nodes can serve it")


def make_role(engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig) -> DecodeRole:
    control, sharing = runtime.control, runtime.sharing
    active = _make_active(engine, runtime, config)
    scheduled = _make_scheduled(engine, runtime, config, active)
    handoffs = _make_handoffs(engine, runtime, config, active, scheduled)
    queues = _make_queues(engine, sharing, config, scheduled, handoffs)
    migrations = OutgoingMigrations(
        scheduler=scheduled.scheduler,
        pages=engine.core.pages,
        tables=engine.core.shape.tables,
        page_bytes=engine.page_bytes,
        port=runtime.port,
        active=active,
    )
    sharing.exports.learn_by(migrations.copied)
    admission = RequestAdmission(
        max_waiting=config.engine.scheduler.max_queued_requests,
        limits=engine.core.limits,
        control=control,
        active=active,
        adapters=engine.adapters,
        locations=PrefixLocations(
            engine.core.cache, engine.core.tiers, shares=config.prefix_sharing.enabled
        ),
        queues=queues,
    )
    canary = Canary(
        num_tokens=config.transfer.canary_tokens,
        vocabulary_size=engine.core.limits.vocabulary_size,
        submit=admission.submit,
        is_busy=lambda: control.draining or scheduled.scheduler.paused or queues.num_waiting > 0,
        counts=active.counters,
    )
    active.outbox.listen(STREAM, canary.take)
    placement = PrefillPlacement(
        config,
        queues=queues,
        cache=engine.core.cache,
        handoffs=handoffs,
        sharing=sharing,
        canary=canary,
        counters=active.counters,
    )
    return DecodeRole(
        runtime,
        queues=queues,
        active=active,
        admission=admission,
        placement=placement,
        handoffs=handoffs,
        migrations=migrations,
        canary=canary,
    )


def _make_active(engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig) -> ActiveRequests:
    # Limit for all requests: the tokens that fit into the pool, and those that may wait.
    max_tokens = engine.core.shape.tables.max_tokens(engine.core.pages.num_pages)
    return ActiveRequests(
        TokenOutbox(runtime.channel),
        TokenBudget(config.engine.scheduler.max_queued_tokens + max_tokens),
        RequestHistory(RequestTimings),
        DecodeCounters(),
    )


def _make_scheduled(
    engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig, active: ActiveRequests
) -> SchedulerQueue[DecodeState]:
    sharing = runtime.sharing

    def admitted(request: Request, holding: PageHolding) -> None:
        sharing.admitted(request)
        state = active.find(request)
        if state is not None:
            state.claims.add(Claim.FETCH, lambda: sharing.forget(request.key))

    return SchedulerQueue(engine.scheduler(config.engine, admitted), active.find)


def _make_handoffs(
    engine: RoleEngine,
    runtime: RoleRuntime,
    config: DecodeConfig,
    active: ActiveRequests,
    scheduled: SchedulerQueue[DecodeState],
) -> IncomingHandoffs:
    return IncomingHandoffs(
        runtime.port,
        scheduled=scheduled,
        reservations=PageReservations(
            scheduler=scheduled.scheduler,
            pages=engine.core.pages,
            cache=engine.core.cache,
            tables=engine.core.shape.tables,
            tiers=engine.core.tiers,
            page_bytes=engine.page_bytes,
        ),
        active=active,
        instance=runtime.instance,
        vocabulary_size=engine.core.limits.vocabulary_size,
        max_granted_pages=config.max_inflight_pages or engine.core.pages.num_pages // 2,
    )


def _make_queues(
    engine: RoleEngine,
    sharing: PrefixSharing,
    config: DecodeConfig,
    scheduled: SchedulerQueue[DecodeState],
    handoffs: IncomingHandoffs,
) -> DecodeQueues:
    scheduler, tiers = scheduled.scheduler, engine.core.tiers
    return DecodeQueues(
        preparing=PreparationStages(
            scheduled.backlog,
            GrammarQueue(engine.guides),
            AdapterQueue(engine.adapters),
            *(() if tiers is None else (TierLoadQueue(tiers, scheduler),)),
        ),
        paused=PausedQueue(scheduler),
        unpaired=UnpairedQueue(sharing.shared.producers, config.reconnect_wait_s),
        fetching=PrefixFetchQueue(sharing.fetches),
        prealloc=handoffs.prealloc,
        transfer=handoffs.transfer,
        scheduled=scheduled,
    )
