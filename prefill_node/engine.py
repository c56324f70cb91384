"""The engine process of a prefill node: its role, and the assembly of the role from an engine.

One scheduler runs hand-offs and pooling prompts. A hand-off arrives from the transfer thread
(handoffs.py). If another node has a prefix of its prompt and a fetch is cheaper than recomputation,
the prefix is fetched first (node/sharing/). When the fetch has ended, successfully or not, the
prompt enters the scheduler. Pooling prompts, which need a vector and no KV, use the same scheduler
(pooling.py).

This module knows no streams or sockets: the transfer thread is behind a TransferPort.
"""

import time
from collections.abc import Mapping

from common.config import EngineConfig, PrefillConfig
from common.distribution import HistogramCounts
from common.queueing import PriorityClass, QueueBacklog
from common.requests.namespace import WeightsId
from common.requests.timeline import RequestTrace, RequestTraces
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.limits import TokenBudget
from engine.batch.request import Request
from engine.kv_cache.pages import PageHolder
from kvtransfer.ports import (
    ClosedEvent,
    GrantedEvent,
    OpenedEvent,
    SetWeightVersion,
    TransferPort,
)
from node.control.commands import PAUSED
from node.control.engine_control import EngineControl
from node.messages import CancelPooling, FrontMessage, SubmitPooling
from node.queues import (
    AdapterQueue,
    Fetches,
    FetchQueue,
    GrammarQueue,
    PreparationStages,
    SchedulerQueue,
    TierLoadQueue,
)
from node.request_state import RequestStage, RequestState
from node.role_parts import RoleEngine, RoleRuntime
from node.sharing.prefixes import PrefixSharing
from prefill_node.admission import HandoffAdmission, PrefillQueues, is_handoff, keys_of_others
from prefill_node.ahead import WAIT_S, PrefillAhead
from prefill_node.embeddings import EmbeddingReads
from prefill_node.handoffs import HandoffHistory, OutgoingHandoffs
from prefill_node.pooling import PoolingCalls

_GIVEN_UP = "this prefill node is paused"


class PrefillRole:
    """A prefill node. Engine thread only."""

    def __init__(
        self,
        queues: PrefillQueues,
        *,
        handoffs: OutgoingHandoffs,
        pooling: PoolingCalls,
        ahead: PrefillAhead,
        sharing: PrefixSharing,
        embeddings: EmbeddingReads,
        control: EngineControl,
        port: TransferPort,
    ) -> None:
        self.scheduler = queues.scheduled.scheduler
        self._queues = queues
        self._handoffs = handoffs
        self._pooling = pooling
        self._ahead = ahead
        self._sharing = sharing
        self._embeddings = embeddings
        self._control = control
        self._port = port

    def poll(self) -> None:
        for event in self._port.take():
            if self._sharing.handle(event):
                continue
            match event:
                case OpenedEvent():
                    self._handoffs.open(event)
                case GrantedEvent():
                    self._handoffs.grant(event)
                case ClosedEvent():
                    self._handoffs.closed(event)
                case _:
                    self._embeddings.handle(event)
        self._sharing.poll()
        if self._reads_embeddings:
            self._embeddings.poll()
        now = time.monotonic()
        self._handoffs.schedule_prepared(now)
        if self._ahead.current is not None or now >= self._may_begin_ahead:
            self._ahead.poll(now)
        for state, ending in self._queues.expired(now):
            state.close(ending)
        self._control.poll(self, self._handle_message)

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome = self.scheduler.finish(batch, result)
        for chunk in outcome.chunks:
            if is_handoff(chunk.request):
                self._handoffs.computed(chunk)
            else:  # each of these ignores the requests of the other
                self._pooling.computed(chunk)
                self._ahead.computed(chunk)
        now = time.monotonic()
        self._queues.scheduled.backlog.tick(now)
        self._sharing.sources.computing.tick(now)
        for finished in outcome.finished:
            if finished.corrupt_prefix is not None:
                self._sharing.corrupt_prefixes.found(finished.corrupt_prefix)
            state = self._queues.scheduled.find(finished.request)
            # Otherwise only its computation ended, and the hand-off is INFLIGHT until ClosedEvent.
            if state is not None and state.stage is RequestStage.SCHEDULED:
                state.close(finished.finish)

    def idle(self) -> None:
        now, next_at = time.monotonic(), self._may_begin_ahead
        wait_s = max(0.0, (next_at if now < next_at else self._ahead.next_at) - now)
        self._control.wait_for_work(self, self.check_leaks, wait_s)

    @property
    def _may_begin_ahead(self) -> float:
        """Time at which the first hand-off has waited long enough to be computed ahead."""
        return self._queues.bootstrap.since + WAIT_S

    def check_leaks(self) -> None:
        """Raise EngineFault if a page or slot has no live holder."""
        exported = [*self._handoffs.exported, *self._sharing.exported()]
        embeddings = (landing.pages for landing in self._embeddings.landing.values())
        reads = [*self._sharing.reads(), *embeddings]
        self.scheduler.check_idle({PageHolder.PUBLICATION: exported, PageHolder.READ: reads})

    @property
    def busy(self) -> bool:
        fetches = self._sharing.busy or self._reads_embeddings
        own = self._handoffs.busy or self._pooling.prompts or self._ahead.current
        return bool(own or fetches)

    @property
    def _reads_embeddings(self) -> bool:
        return bool(self._embeddings.in_progress or self._embeddings.landing)

    def queues(self) -> dict[str, int]:
        return {**self._queues.lengths(), "pooled": len(self._pooling.prompts)}

    def waiting_by_class(self) -> Mapping[PriorityClass, int]:
        return self.scheduler.waiting_by_class()

    def handoffs(self) -> list[dict[str, object]]:
        return self._handoffs.describe()

    def counters(self) -> dict[str, int]:
        return {
            **self.scheduler.counters(),
            **self._handoffs.counts,
            **self._sharing.counters(),
            **self._embeddings.counts,
            "pooled_prompts": self._pooling.num_pooled,
            "tokens_ahead": self._ahead.num_tokens,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def backlogs(self) -> dict[str, QueueBacklog]:
        return {"prompts": self._queues.scheduled.backlog.backlog}

    def explain(self, request_id: str) -> RequestTraces:
        return self._handoffs.history.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._handoffs.history.flights(num_ended)

    def abort(self, request_id: str) -> int:
        return self._handoffs.abort(request_id) + self._pooling.abort(request_id)

    def abort_all(self) -> int:
        """Abort all pooling calls and fail all hand-offs. Returns the number of aborted prompts.

        Decode nodes decide whether the requests of failed hand-offs end.
        """
        self._handoffs.fail_all(_GIVEN_UP)
        return self._pooling.abort_all(PAUSED)

    def release_kv(self) -> bool:
        """Fail hand-offs and release KV, except computed pages, which are read to the end. Returns
        whether everything is released.
        """
        self._handoffs.fail_all(_GIVEN_UP)
        self._ahead.stop()
        self.scheduler.requeue_all()
        return not (self._handoffs.exported or self._sharing.fetches.busy)

    def update_waiting_requests(self) -> None:
        self._ahead.stop()
        self._pooling.update_waiting_requests()

    def set_weight_version(self, weights: WeightsId) -> None:
        self._port.post(SetWeightVersion(weights))

    def _handle_message(self, message: FrontMessage) -> None:
        match message:
            case SubmitPooling():
                self._pooling.submit(message)
            case CancelPooling(number=number):
                self._pooling.cancel(number)


CHUNK_TOKENS = 8192  # large, because no decode rows wait for a chunk here


def wants(config: EngineConfig) -> EngineConfig:
    """Return the configuration without the parts that a prefill node does not use: requests end
    with their first token, so none is retracted to host memory, and no step has only decode rows.
    """
    cache = config.cache.model_copy(update={"swap_pages": 0})
    chunk = config.scheduler.auto_chunk_tokens or CHUNK_TOKENS
    scheduler = config.scheduler.model_copy(update={"auto_chunk_tokens": chunk})
    return config.model_copy(update={"cache": cache, "scheduler": scheduler, "cuda_graphs": False})


def check(engine: RoleEngine) -> None:
    """Accept every engine."""


def make_role(engine: RoleEngine, runtime: RoleRuntime, config: PrefillConfig) -> PrefillRole:
    control, sharing, steps = runtime.control, runtime.sharing, config.engine.scheduler

    def find(request: Request) -> RequestState | None:
        return handoffs.find(request) or pooling.find(request) or ahead.find(request)

    def admitted(request: Request, holding: PageHolding) -> None:
        if is_handoff(request):
            handoffs.admitted(request, holding)
        else:
            ahead.admitted(request)  # ignores pooling prompts

    embeddings = _embedding_reads(engine, runtime, config)
    scheduler = engine.scheduler(config.engine, admitted)
    scheduled = SchedulerQueue(scheduler, find)
    queues = _queues(engine, scheduled, sharing.fetches, embeddings)
    tokens = TokenBudget(steps.max_queued_tokens)  # of prompts without pages
    other_keys = keys_of_others()
    admission = HandoffAdmission(
        max_waiting=steps.max_queued_requests,
        limits=engine.core.limits,
        scheduler=scheduler,
        control=control,
        adapters=engine.adapters,
        backlog=scheduled.backlog,
        tokens=tokens,
    )
    handoffs = OutgoingHandoffs(
        admission,
        queues=queues,
        history=HandoffHistory(control.notify),
        pages=engine.core.pages,
        tables=engine.core.shape.tables,
        port=runtime.port,
        sharing=sharing,
        embeddings=embeddings,
    )
    pooling = PoolingCalls(
        scheduled,
        limits=engine.core.limits,
        max_waiting=steps.max_queued_requests,
        tokens=tokens,
        control=control,
        keys=other_keys,
    )
    ahead = PrefillAhead(
        queues,
        cache=engine.core.cache,
        adapters=engine.adapters,
        is_coming=lambda key: key in sharing.fetches.waits or key in embeddings.waits,
        keys=other_keys,
        max_tokens=_max_tokens_ahead(engine, config),
    )
    return PrefillRole(
        queues,
        handoffs=handoffs,
        pooling=pooling,
        ahead=ahead,
        sharing=sharing,
        embeddings=embeddings,
        control=control,
        port=runtime.port,
    )


def _embedding_reads(
    engine: RoleEngine, runtime: RoleRuntime, config: PrefillConfig
) -> EmbeddingReads:
    control = runtime.control
    return EmbeddingReads(
        engine.core.encoder,
        runtime.sharing.shared,
        runtime.port,
        pages=engine.core.pages,
        weights=lambda: control.weights,
        timeout_s=config.encode_timeout_s,
    )


def _queues(
    engine: RoleEngine,
    scheduled: SchedulerQueue[RequestState],
    fetches: Fetches,
    embeddings: EmbeddingReads,
) -> PrefillQueues:
    tiers = engine.core.tiers
    preparing: PreparationStages[RequestState] = PreparationStages(
        scheduled.backlog,
        GrammarQueue(engine.guides),
        AdapterQueue(engine.adapters),
        *(() if tiers is None else (TierLoadQueue(tiers, scheduled.scheduler),)),
        FetchQueue("fetching", fetches),
        FetchQueue("embeddings", embeddings),
    )
    return PrefillQueues(preparing, scheduled)


def _max_tokens_ahead(engine: RoleEngine, config: PrefillConfig) -> int:
    """Return the tokens of half the pool. The other half keeps prefixes of other requests."""
    if not (config.compute_ahead and config.engine.cache.prefix_cache):
        return 0
    tables = engine.core.shape.tables
    return engine.core.pages.num_pages // tables.num_tables * tables.page_size // 2
