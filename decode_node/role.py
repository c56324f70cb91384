"""The decode node's role: prealloc queue -> transfer queue -> running batch.

    submitted --(an owner is paired)--> prealloc queue --grant--> transfer queue --held--> running
        |           ^                       |  lost: next owner, then local     |
        |---> unpaired (owners just lost) <-+-----------------------------------|
        `--(colocated, short, no owner)-----+-----------------------------------+--> waiting queue

This node is responsible for a request from submission to the last token (active_requests.py). It
can always prefill a request itself after a failed hand-off. The dispatcher places requests,
Handoffs tracks hand-offs in progress, and the scheduler holds requests that are computed here. None
of them knows streams or sockets: the router is behind the desk and the outbox, other nodes behind a
TransferPort. For outgoing migrations this node is the producer (outgoing_migrations.py).
"""

import math
import time
from collections.abc import Mapping

from common.config import DecodeConfig
from common.distribution import HistogramCounts
from common.errors import ServingError
from common.page_tables import PageTables
from common.priority import PriorityClass
from common.queueing.drain import QueueBacklog, QueueEstimator
from common.requests.request_trace import RequestTrace, RequestTraces
from common.requests.weights import WeightsId
from decode_node import canary
from decode_node.active_requests import ActiveRequests
from decode_node.admission import RequestAdmission
from decode_node.canary import Canary
from decode_node.counts import DecodeCounters
from decode_node.handoffs import FailedHandoff, IncomingHandoffs
from decode_node.open_handoffs import open_handoffs
from decode_node.outgoing_migrations import OutgoingMigrations
from decode_node.output_length import OutputLengthEstimate
from decode_node.page_reservations import PageReservations
from decode_node.placement import PrefillPlacement
from decode_node.prefix_holders import PrefixLocations
from engine.adapters.adapters import AdapterManager
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.limits import RequestLimits
from engine.batch.request import FinishReason, Request, RequestEnd, moved
from engine.grammar.guides import GrammarCache
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from engine.scheduler.scheduler import ChunkDone, FinishedRequest, Scheduler
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailedEvent,
    FirstTokenEvent,
    GrantedEvent,
    OpenedEvent,
    OwnerRate,
    ProducerDown,
    ProducerUp,
    QueuedEvent,
    ReadsEndedEvent,
    SetWeightVersion,
    TransferPort,
)
from node.control.engine_control import EngineControl
from node.control.outbox import TokenOutbox
from node.control.pauses import PAUSED
from node.messages import (
    CancelSubmitted,
    FrontMessage,
    QuarantineStarted,
    RouterStreamClosed,
    SubmitRequest,
)
from node.queues.adapter_queue import AdapterQueue
from node.queues.grammar_queue import GrammarQueue
from node.queues.preparations import PreparationStages
from node.queues.tier_load_queue import TierLoadQueue
from node.sharing.prefixes import PrefixSharing


class DecodeRole:
    """State and queues of a decode node. Engine thread only."""

    def __init__(
        self,
        *,
        config: DecodeConfig,
        instance: int,
        scheduler: Scheduler,
        pages: PageAllocator,
        cache: PrefixCache,
        tables: PageTables,
        page_bytes: int,
        limits: RequestLimits,
        port: TransferPort,
        desk: EngineControl,
        outbox: TokenOutbox,
        adapters: AdapterManager,
        guides: GrammarCache,
        sharing: PrefixSharing,
        tiers: CacheTiers,
    ) -> None:
        self.scheduler = scheduler
        self._port = port
        self._desk = desk
        self._outbox = outbox
        self._sharing = sharing
        self._tiers = tiers
        # Limit for all requests: the tokens that fit into the pool and those that may wait.
        most_tokens = config.engine.scheduler.max_queued_tokens + tables.max_tokens(pages.num_pages)
        self._counts = DecodeCounters()
        self._live = ActiveRequests(outbox, self._counts, adapters, most_tokens)
        self._prompts = QueueEstimator()  # prompts to be computed here
        self._answers = OutputLengthEstimate()
        self._door = RequestAdmission(
            max_waiting=config.engine.scheduler.max_queued_requests,
            limits=limits,
            desk=desk,
            live=self._live,
            adapters=adapters,
            holders=PrefixLocations(cache, tiers, shares=config.prefix_sharing.enabled),
            prompts=self._prompts,
            answers=self._answers,
        )
        self._destinations = PageReservations(
            scheduler=scheduler,
            pages=pages,
            cache=cache,
            tables=tables,
            tiers=tiers,
            page_bytes=page_bytes,
        )
        self._handoffs = IncomingHandoffs(
            instance=instance,
            vocabulary_size=limits.vocabulary_size,
            max_granted_pages=config.max_inflight_pages or pages.num_pages // 2,
            port=port,
            scheduler=scheduler,
            destinations=self._destinations,
            live=self._live,
            counts=self._counts,
        )
        self._dispatcher = PrefillPlacement(
            config,
            scheduler=scheduler,
            cache=cache,
            handoffs=self._handoffs,
            prompts=self._prompts,
            live=self._live,
            counts=self._counts,
            sharing=sharing,
        )
        self._departures = OutgoingMigrations(
            scheduler=scheduler,
            pages=pages,
            tables=tables,
            page_bytes=page_bytes,
            port=port,
            live=self._live,
            counts=self._counts,
            on_moved=self._moved_away,
        )
        sharing.loans.learn_by(self._departures.copied)
        self._canary = Canary(
            num_tokens=config.transfer.canary_tokens,
            vocabulary_size=limits.vocabulary_size,
            submit=self._submit,
            is_busy=lambda: self._desk.draining or scheduler.paused or self._num_waiting > 0,
            counts=self._counts,
        )
        outbox.listen(canary.STREAM, self._canary.take)
        self._preparations: PreparationStages[SubmitRequest] = PreparationStages(
            GrammarQueue(guides),
            AdapterQueue(adapters),
            TierLoadQueue(tiers, lambda: scheduler.free_capacity().num_pages),
        )
        self._told_trial: Request | None = None

    # Role ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        now = time.monotonic()
        for lost in self._take_events(now):  # after all events, so that lost producers are known
            self._dispatcher.retry(lost)
        self._expire(now)
        self._desk.poll(self, self._take)
        self._place_prepared(now)
        self._departures.poll(now)
        self._dispatcher.place_unpaired(now)
        self._dispatcher.place_paused(now)
        self._dispatcher.place_fetched(now)
        self._handoffs.join()
        self._handoffs.grant(now)
        self._handoffs.expire(now)
        self._outbox.flush()

    def next_batch(self) -> ScheduleBatch | None:
        if self._launch_waits_s > 0:
            return None
        batch = self.scheduler.next_batch()
        if self.scheduler.on_trial is not self._told_trial:
            self._tell_trial(self.scheduler.on_trial)
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome = self.scheduler.finish(batch, result)
        self._outbox.tokens(outcome.streams, outcome.requests, outcome.tokens)
        for origin, logprobs in outcome.logprobs:
            self._live.tell_logprobs(origin, logprobs)
        for origin, predicted in outcome.predicted:
            self._outbox.predicted(origin, predicted)
        for chunk in outcome.chunks:
            self._stamp_chunk(chunk)
            num_left = len(chunk.request.token_ids) - chunk.end
            self._prompts.serve(chunk.request.key, num_left)
            self._sharing.ways.computed(chunk.request.key, num_left)
            if chunk.first_token is not None:
                self._outbox.begin(chunk.request.origin, chunk.request.cached_tokens)
            if chunk.prompt_logprobs is not None:
                self._outbox.prompt_logprobs(chunk.request.origin, chunk.prompt_logprobs)
        now = time.monotonic()
        self._prompts.tick(now)
        self._sharing.ways.tick(now)
        for finished in outcome.finished:
            if finished.spoilt is not None:
                self._sharing.spoilt.found(finished.spoilt)
            self._note_length(finished, now)
            self._ended(finished)
        self._outbox.flush()

    def idle(self) -> None:
        self._desk.rest(self, self.check, self._launch_waits_s or math.inf)

    @property
    def _launch_waits_s(self) -> float:
        return self._handoffs.launch_waits_s(time.monotonic(), ahead=self.scheduler.computes)

    def check(self) -> None:
        """Raise EngineFault if a page or slot has no live owner."""
        joining = [transfer.destination.holding.flat() for transfer in self._handoffs.transfer]
        reads = [*self._destinations.reads.values(), *self._sharing.reads()]
        lent = [*self._departures.lent(), *self._sharing.lent()]
        self.scheduler.check_idle(
            {PageHolder.REQUEST: joining, PageHolder.READ: reads, PageHolder.PUBLICATION: lent}
        )

    # Events of the transfer thread ----------------------------------------------------------------

    def _take_events(self, now: float) -> list[FailedHandoff]:
        lost: list[FailedHandoff | None] = []
        for event in self._canary.admitted(self._port.take(), now):
            if self._sharing.take(event):
                continue
            match event:
                case ProducerUp():
                    self._dispatcher.owner_up(event)
                    self._desk.links[event.address] = (event.path, event.gib_per_s)
                case OwnerRate():
                    self._desk.link_measured(event.address, event.gib_per_s)
                case ProducerDown():
                    if self._dispatcher.owner_down(event, now):
                        self._desk.links.pop(event.address, None)
                case QueuedEvent():
                    self._handoffs.admitted(event)
                case FirstTokenEvent():
                    lost.append(self._handoffs.first_token(event))
                case CompletedEvent():
                    self._handoffs.held(event)
                case FailedEvent():
                    lost.append(self._handoffs.lost(event))
                case ReadsEndedEvent():
                    self._destinations.reads_ended(event.id)
                case OpenedEvent():
                    self._departures.opened(event)
                case GrantedEvent():
                    self._departures.granted(event)
                case ClosedEvent():
                    self._departures.dropped(event)
        return [each for each in lost if each is not None]

    # Calls of the desk ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        of_own = self._live or self._destinations.reads
        copies = self._sharing.busy or self._tiers.busy
        return bool(of_own or self._departures.busy or copies)

    def queues(self) -> dict[str, int]:
        return {
            **self.scheduler.queues(),
            **self._preparations.queues(),
            "paused": len(self._dispatcher.held_back),
            "unpaired": len(self._dispatcher.unpaired),
            "fetching": self._dispatcher.num_fetching,
            "prealloc": len(self._handoffs.prealloc),
            "transfer": len(self._handoffs.transfer),
            "migrating": len(self._departures),
        }

    def waiting_by_class(self) -> Mapping[PriorityClass, int]:
        return self.scheduler.waiting_by_class() + self._handoffs.prealloc.by_class()

    def handoffs(self) -> list[dict[str, object]]:
        return open_handoffs(
            self._dispatcher.unpaired, self._handoffs.prealloc, self._handoffs.transfer
        )

    def counters(self) -> dict[str, int]:
        own = self._counts.totals()
        return {**self.scheduler.counters(), **own, **self._sharing.counters()}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {**self._counts.distributions(), **self.scheduler.distributions()}

    def backlogs(self) -> dict[str, QueueBacklog]:
        return {"prompts": self._prompts.backlog, "pages": self._handoffs.backlog}

    def abort(self, request_id: str) -> int:
        doomed = [request for request in self._live if request.spec.request_id == request_id]
        for request in doomed:
            self._abort(request, RequestEnd(FinishReason.ABORT, "aborted by an operator"))
        return len(doomed)

    def abort_all(self) -> int:
        doomed = tuple(self._live)
        for request in doomed:
            self._abort(request, RequestEnd(FinishReason.ABORT, PAUSED))
        return len(doomed)

    def let_go(self) -> bool:
        self._departures.give_up_all("this node is paused")
        for lost in self._handoffs.cancel_all("this node is paused"):
            self._dispatcher.retry(lost)
        if len(self._departures):
            return False
        self.scheduler.requeue_all()
        return not self._sharing.fetches.busy

    def renew(self) -> None:
        for request in self._live:
            request.compute_with(self._desk.weights)

    def set_weight_version(self, weights: WeightsId) -> None:
        self._port.post(SetWeightVersion(weights))
        self._desk.links.clear()

    def explain(self, request_id: str) -> RequestTraces:
        return self._live.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._live.flights(num_ended)

    # Messages of the router -----------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        cancelled = RequestEnd(FinishReason.ABORT, "cancelled")
        match message:
            case SubmitRequest():
                self._submit(message)
            case CancelSubmitted(stream, number):
                request = self._live.get((stream, number))
                if request is not None:
                    self._abort(request, cancelled)
            case RouterStreamClosed(stream):
                for request in self._live:
                    if request.origin[0] == stream:
                        self._abort(request, cancelled)

    def _submit(self, message: SubmitRequest) -> None:
        request = self._door.meet(message)
        try:
            self._door.take(request, message, self._num_waiting)
            self._preparations.put(request, message)
        except ServingError as error:
            self._live.refuse(request, error)

    def _place_prepared(self, now: float) -> None:
        for request, message, refusal in self._preparations.take(now):
            try:
                if refusal is not None:
                    raise refusal
                placement = message.placement
                if placement.move_from is not None:
                    self._dispatcher.place_mover(request, placement.move_from)
                elif message.stream == canary.STREAM and placement.prefill_addresses:
                    self._handoffs.open(request, self._canary.owner, (), 1)
                else:
                    self._dispatcher.place(request, placement.prefill_addresses)
            except ServingError as error:
                self._live.refuse(request, error)

    @property
    def _num_waiting(self) -> int:
        """Number of requests that wait for pages or a producer. Admitted ones may change queues."""
        num_elsewhere = len(self._dispatcher.unpaired) + len(self._handoffs.prealloc)
        num_elsewhere += len(self._dispatcher.held_back)
        num_elsewhere += len(self._preparations) + self._dispatcher.num_fetching
        return num_elsewhere + self.scheduler.num_waiting

    # Ends ---------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        queued_s = self._prompts.queued_s
        late = self._preparations.expire(now, queued_s) + self.scheduler.expire(now, queued_s)
        for finished in late:
            self._counts.dropped(finished.finish)
            self._ended(finished)

    def _abort(self, request: Request, finish: RequestEnd) -> None:
        waited = self._preparations.remove(request) or self._dispatcher.give_up(request)
        if waited or self._handoffs.give_up(request, finish.error):
            self._live.end(request, finish)
            return
        finished = self.scheduler.abort(request, finish)
        if finished is not None:
            self._ended(finished)

    def _moved_away(self, request: Request) -> None:
        self.scheduler.remove_migrated(request)
        self._ended(FinishedRequest(request, moved()))

    def _ended(self, finished: FinishedRequest) -> None:
        """End a request that has left the scheduler."""
        self._departures.ended(finished.request)
        self._prompts.leave(finished.request.key)
        self._sharing.forget(finished.request.key)
        self._live.end(finished.request, finished.finish)

    def _note_length(self, finished: FinishedRequest, now: float) -> None:
        """Record the length of a response that was not cut short."""
        stamps = self._live.stamps(finished.request)
        if finished.num_generated and stamps.first_token:
            self._answers.ended(finished.num_generated, now - stamps.first_token)

    # Timings of a request -------------------------------------------------------------------------

    def _stamp_chunk(self, chunk: ChunkDone) -> None:
        """Record the prefill time at the first last chunk only.

        A retracted request is recomputed.
        """
        stamps = self._live.stamps(chunk.request)
        if chunk.first_token is not None and stamps.queued and not stamps.prefilled:
            stamps.prefilled = time.monotonic()
            stamps.note_first_token(stamps.prefilled)

    def _tell_trial(self, request: Request | None) -> None:
        """Report the request on trial, before the launch of the step that may crash the engine."""
        self._told_trial = request
        self._desk.notify(
            QuarantineStarted(*request.origin) if request else QuarantineStarted(0, 0)
        )
