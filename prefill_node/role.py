"""The prefill node's role: one scheduler for hand-offs and pooling prompts.

A hand-off arrives from the transfer thread and passes through this node (handoffs.py). If another
node has a prefix of its prompt and a fetch is cheaper than recomputation, the prefix is fetched
(node/sharing/). The prompt enters the scheduler when the fetch has ended, successfully or not.
Pooling prompts, which need a vector and no KV, use the same scheduler (pooling.py).

This module knows nothing of streams and sockets: the transfer thread is behind a NodePort.
"""

import time
from collections.abc import Callable, Mapping

from common.distribution import Counted
from common.page_tables import PageTables
from common.priority import PriorityClass
from common.queueing.drain import Backlog, Drain
from common.requests.request_trace import Flight, Flights
from common.requests.weights import WeightsId
from engine.adapters.adapters import Adapters
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.holding import Holding
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.batch.token_budget import HeldTokens
from engine.grammar.guides import Guides
from engine.kv_cache.pages import Holder, PageAllocator
from engine.offload.tiers import Tiers
from engine.scheduler.scheduler import Finished, Scheduler
from kvtransfer.ports import (
    ComputesWith,
    Granted,
    HandoffDropped,
    NodePort,
    Opened,
    OwnerDown,
    OwnerRate,
    OwnerUp,
)
from node.control.engine_control import Desk
from node.control.pauses import PAUSED
from node.messages import CancelPooling, FrontMessage, PoolPrompts
from node.queues.adapter_queue import AdapterLine
from node.queues.grammar_queue import GuideLine
from node.queues.preparations import Preparations
from node.queues.tier_load_queue import TierLine
from node.sharing.fetch_queue import FetchLine
from node.sharing.prefixes import PrefixSharing
from prefill_node.admission import Door
from prefill_node.handoffs import Handoffs
from prefill_node.pooling import PooledCalls

MakeScheduler = Callable[[Callable[[Request, Holding], None]], Scheduler]

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
        port: NodePort,
        desk: Desk,
        adapters: Adapters,
        guides: Guides,
        sharing: PrefixSharing,
        tiers: Tiers,
    ) -> None:
        self.scheduler = make_scheduler(self._admitted)
        self._port = port
        self._desk = desk
        self._sharing = sharing
        self._tiers = tiers
        self._prompts = Drain()  # prompts that are granted and not computed yet
        tokens = HeldTokens(max_waiting_tokens)  # of prompts without pages
        self._preparations: Preparations[None] = Preparations(
            GuideLine(guides),
            AdapterLine(adapters),
            TierLine(tiers, lambda: self.scheduler.room().num_pages),
            FetchLine(sharing.fetches),
        )
        self._pooled = PooledCalls(
            self.scheduler,
            limits=limits,
            max_waiting=max_waiting,
            tokens=tokens,
            prompts=self._prompts,
            tell=desk.notify,
            weights=lambda: desk.weights,
        )
        door = Door(
            max_waiting=max_waiting,
            limits=limits,
            scheduler=self.scheduler,
            desk=desk,
            adapters=adapters,
            prompts=self._prompts,
            tokens=tokens,
        )
        self._handoffs = Handoffs(
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
                case OwnerUp():
                    self._desk.links[event.address] = (event.path, event.gib_per_s)
                case OwnerRate():
                    self._desk.link_measured(event.address, event.gib_per_s)
                case OwnerDown():
                    self._desk.links.pop(event.address, None)
                case Opened():
                    self._handoffs.open(event)
                case Granted():
                    self._handoffs.grant(event)
                case HandoffDropped():
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
        self.scheduler.check_idle({Holder.PUBLICATION: lent, Holder.READ: reads})

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

    def distributions(self) -> Mapping[str, Counted]:
        return {}

    def backlogs(self) -> dict[str, Backlog]:
        return {"prompts": self._prompts.backlog}

    def explain(self, request_id: str) -> Flights:
        return self._handoffs.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, Flight]]:
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
        self.scheduler.start_over()
        return not (self._handoffs.lent or self._sharing.fetches.busy)

    def renew(self) -> None:
        self._pooled.renew()

    def pair_as(self, weights: WeightsId) -> None:
        self._port.post(ComputesWith(weights))
        self._desk.links.clear()

    # Messages and ends ----------------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        match message:
            case PoolPrompts():
                self._pooled.take(message, draining=self._desk.draining)
            case CancelPooling(number=number):
                self._pooled.cancel(number)

    def _admitted(self, request: Request, holding: Holding) -> None:
        if request.pooling is None:
            self._handoffs.admitted(request, holding)

    def _ended(self, finished: Finished) -> None:
        if finished.request.pooling is not None:
            self._pooled.ended(finished.request, finished.finish)
        else:
            self._handoffs.ended(finished.request, finished.finish)
