"""The prefill node's role: one scheduler for hand-offs and pooling prompts.

A hand-off arrives from the transfer thread and passes through this node (handoffs.py). If another
node has a prefix of its prompt and a fetch is cheaper than recomputation, the prefix is fetched
(node/sharing/). The prompt enters the scheduler when the fetch has ended, successfully or not.
Pooling prompts, which need a vector and no KV, use the same scheduler (pooling.py).

This module knows nothing of streams and sockets: the transfer thread is behind a TransferPort.
"""

import time
from collections.abc import Callable, Mapping

from common.distribution import HistogramCounts
from common.page_tables import PageTables
from common.priority import PriorityClass
from common.queueing.drain import QueueBacklog, QueueEstimator
from common.requests.request_trace import RequestTrace, RequestTraces
from common.requests.weights import WeightsId
from engine.adapters.adapters import AdapterManager
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.batch.token_budget import TokenBudget
from engine.grammar.guides import GrammarCache
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.offload.cache_tiers import CacheTiers
from engine.scheduler.scheduler import FinishedRequest, Scheduler
from kvtransfer.ports import (
    ClosedEvent,
    GrantedEvent,
    OpenedEvent,
    OwnerRate,
    ProducerDown,
    ProducerUp,
    SetWeightVersion,
    TransferPort,
)
from node.control.engine_control import EngineControl
from node.control.pauses import PAUSED
from node.messages import CancelPooling, FrontMessage, SubmitPooling
from node.queues.adapter_queue import AdapterQueue
from node.queues.grammar_queue import GrammarQueue
from node.queues.preparations import PreparationStages
from node.queues.tier_load_queue import TierLoadQueue
from node.sharing.fetch_queue import FetchQueue
from node.sharing.prefixes import PrefixSharing
from prefill_node.admission import HandoffAdmission
from prefill_node.handoffs import OutgoingHandoffs
from prefill_node.pooling import PoolingCalls

MakeScheduler = Callable[[Callable[[Request, PageHolding], None]], Scheduler]

_GIVEN_UP = "this prefill node is paused"


class PrefillRole:
    """State and queues of a prefill node. Engine thread only."""

    def __init__(
        self,
        *,
        make_scheduler: MakeScheduler,
        pages: PageAllocator,
        tables: PageTables,
        limits: RequestLimits,
        max_waiting: int,
        max_waiting_tokens: int,
        port: TransferPort,
        desk: EngineControl,
        adapters: AdapterManager,
        guides: GrammarCache,
        sharing: PrefixSharing,
        tiers: CacheTiers,
    ) -> None:
        self.scheduler = make_scheduler(self._admitted)
        self._port = port
        self._desk = desk
        self._sharing = sharing
        self._tiers = tiers
        self._prompts = QueueEstimator()  # prompts that are granted and not computed yet
        tokens = TokenBudget(max_waiting_tokens)  # of prompts without pages
        self._preparations: PreparationStages[None] = PreparationStages(
            GrammarQueue(guides),
            AdapterQueue(adapters),
            TierLoadQueue(tiers, lambda: self.scheduler.free_capacity().num_pages),
            FetchQueue(sharing.fetches),
        )
        self._pooled = PoolingCalls(
            self.scheduler,
            limits=limits,
            max_waiting=max_waiting,
            tokens=tokens,
            prompts=self._prompts,
            tell=desk.notify,
            weights=lambda: desk.weights,
        )
        door = HandoffAdmission(
            max_waiting=max_waiting,
            limits=limits,
            scheduler=self.scheduler,
            desk=desk,
            adapters=adapters,
            prompts=self._prompts,
            tokens=tokens,
        )
        self._handoffs = OutgoingHandoffs(
            door,
            scheduler=self.scheduler,
            pages=pages,
            tables=tables,
            port=port,
            desk=desk,
            adapters=adapters,
            preparations=self._preparations,
            sharing=sharing,
            prompts=self._prompts,
            tokens=tokens,
        )

    # Role ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self._port.take():
            if self._sharing.take(event):
                continue
            match event:
                case ProducerUp():
                    self._desk.links[event.address] = (event.path, event.gib_per_s)
                case OwnerRate():
                    self._desk.link_measured(event.address, event.gib_per_s)
                case ProducerDown():
                    self._desk.links.pop(event.address, None)
                case OpenedEvent():
                    self._handoffs.open(event)
                case GrantedEvent():
                    self._handoffs.grant(event)
                case ClosedEvent():
                    self._handoffs.dropped(event)
        now = time.monotonic()
        for request, _, refusal in self._preparations.take(now):
            self._handoffs.prepared(request, refusal)
        queued_s = self._prompts.queued_s
        for finished in self._preparations.expire(now, queued_s):
            self._ended(finished)
        for finished in self.scheduler.expire(now, queued_s):
            self._ended(finished)
        self._desk.poll(self, self._take)

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome = self.scheduler.finish(batch, result)
        for chunk in outcome.chunks:
            if chunk.request.pooling is not None:
                self._pooled.computed(chunk)
            else:
                self._handoffs.computed(chunk)
        now = time.monotonic()
        self._prompts.tick(now)
        self._sharing.ways.tick(now)
        for finished in outcome.finished:
            if finished.spoilt is not None:
                self._sharing.spoilt.found(finished.spoilt)
            self._ended(finished)

    def idle(self) -> None:
        self._desk.rest(self, self.check)

    def check(self) -> None:
        """Raise EngineFault if a page or slot has no live owner."""
        lent = [*self._handoffs.lent, *self._sharing.lent()]
        reads = self._sharing.reads()
        self.scheduler.check_idle({PageHolder.PUBLICATION: lent, PageHolder.READ: reads})

    # Calls of the desk ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        of_own = self._handoffs.busy or self._pooled
        return bool(of_own or self._sharing.busy or self._tiers.busy)

    def queues(self) -> dict[str, int]:
        return {
            **self.scheduler.queues(),
            **self._preparations.queues(),
            **self._handoffs.queues(),
            "pooled": len(self._pooled),
        }

    def waiting_by_class(self) -> Mapping[PriorityClass, int]:
        return self.scheduler.waiting_by_class()

    def handoffs(self) -> list[dict[str, object]]:
        return self._handoffs.told()

    def counters(self) -> dict[str, int]:
        return {
            **self.scheduler.counters(),
            **self._handoffs.counters(),
            **self._sharing.counters(),
            "pooled_prompts": self._pooled.num_pooled,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def backlogs(self) -> dict[str, QueueBacklog]:
        return {"prompts": self._prompts.backlog}

    def explain(self, request_id: str) -> RequestTraces:
        return self._handoffs.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._handoffs.flights(num_ended)

    def abort(self, request_id: str) -> int:
        return self._handoffs.abort(request_id) + self._pooled.abort(request_id)

    def abort_all(self) -> int:
        """Abort all pooling calls and fail hand-offs. Returns the number of aborted prompts.

        Decode nodes decide whether the requests of failed hand-offs end.
        """
        self._handoffs.give_up_all(_GIVEN_UP)
        return self._pooled.abort_all(PAUSED)

    def let_go(self) -> bool:
        """Fail hand-offs and release KV.

        Computed pages are read to the end. Returns whether all is released.
        """
        self._handoffs.give_up_all(_GIVEN_UP)
        self.scheduler.requeue_all()
        return not (self._handoffs.lent or self._sharing.fetches.busy)

    def renew(self) -> None:
        self._pooled.renew()

    def set_weight_version(self, weights: WeightsId) -> None:
        self._port.post(SetWeightVersion(weights))
        self._desk.links.clear()

    # Messages and ends ----------------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        match message:
            case SubmitPooling():
                self._pooled.take(message, draining=self._desk.draining)
            case CancelPooling(number=number):
                self._pooled.cancel(number)

    def _admitted(self, request: Request, holding: PageHolding) -> None:
        if request.pooling is None:
            self._handoffs.admitted(request, holding)

    def _ended(self, finished: FinishedRequest) -> None:
        if finished.request.pooling is not None:
            self._pooled.ended(finished.request, finished.finish)
        else:
            self._handoffs.ended(finished.request, finished.finish)
