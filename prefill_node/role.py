"""The prefill node's role: bootstrap queue -> scheduler -> inflight queue.

    Opened            Granted                    last chunk done         HandoffDropped
      -> bootstrap queue -> waiting, prefilling  ------------> inflight queue -> gone

A hand-off may be dropped in any queue: its reader cancelled, its stream ended, its budget ran out.
What another node has of a prompt is read meanwhile, where that is cheaper than to compute it
(sharing/); the scheduler gets such a prompt when that is over, either way.
Its pages are held for publication from admission until then, whatever becomes of the request.
Prompts of which a vector is wanted, and no KV, share the scheduler: pooled.py.
This module knows nothing of streams and sockets: the transfer thread is behind a NodePort.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from common.distribution import Counted
from common.engine.adapters.adapters import Adapters
from common.engine.features.guides import Guides
from common.engine.memory.pages import Holder, PageAllocator
from common.engine.preparation.adapter_line import AdapterLine
from common.engine.preparation.guide_line import GuideLine
from common.engine.preparation.preparations import Preparations
from common.engine.preparation.tier_line import TierLine
from common.engine.rows.batch import BatchResult, ScheduleBatch
from common.engine.rows.held_tokens import HeldTokens
from common.engine.rows.holding import Holding
from common.engine.rows.limits import RequestLimits
from common.engine.rows.request import Finish, FinishReason, Ints, Request
from common.engine.schedule.scheduler import ChunkDone, Finished, Scheduler
from common.engine.tiers.tiers import Tiers
from common.errors import ServingError
from common.logs.throttle import Throttle, ThrottledLog
from common.node.desk import Desk
from common.node.messages import CancelPooling, FrontMessage, PoolPrompts
from common.node.pauses import PAUSED
from common.page_tables import PageTables
from common.priority import PriorityClass
from common.queueing.drain import Backlog, Drain
from common.queueing.waiting_line import Place
from common.requests.flight import Flight, Flights
from common.requests.weights import WeightsId
from kvtransfer.ports import (
    Admit,
    ComputesWith,
    FailHandoff,
    Granted,
    HandoffDropped,
    NodePort,
    Opened,
    OwnerDown,
    OwnerUp,
    Publish,
)
from prefill_node.door import COUNTS, Door, refusal_of
from prefill_node.pooled import PooledCalls
from prefill_node.records import HandoffRecords
from sharing.fetch_line import FetchLine
from sharing.prefixes import PrefixSharing

log = logging.getLogger(__name__)

MakeScheduler = Callable[[Callable[[Request, Holding], None]], Scheduler]


@dataclass(slots=True, eq=False)
class Prefilling:
    """A granted hand-off whose prompt waits for its pages or is being computed."""

    serial: int
    request: Request
    prefix_tokens: int  # the reader has them
    published: int  # token ranges up to here are out
    holding: Holding  # of the whole prompt; empty until admission


class PrefillRole:
    """Serves hand-offs. Engine thread only."""

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
        self._pages = pages
        self._tables = tables
        self._tokens = HeldTokens(max_waiting_tokens)  # of those that have no pages yet
        self._port = port
        self._desk = desk
        self._sharing = sharing
        self._tiers = tiers
        # By the serial of the hand-off, which is its request's key too.
        self._bootstrap: dict[int, Request] = {}
        self._prefilling: dict[int, Prefilling] = {}
        self._inflight: dict[int, Prefilling] = {}
        self._lent: dict[int, Ints] = {}  # pages held for publication
        self._records = HandoffRecords(ThrottledLog(log, Throttle(most=100)), desk.notify)
        self._prompts = Drain()  # granted, and not computed yet
        self._adapters = adapters
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
            tokens=self._tokens,
            prompts=self._prompts,
            tell=desk.notify,
            weights=lambda: desk.weights,
        )
        self._door = Door(
            limits,
            self._tokens,
            self._prompts,
            desk,
            max_waiting=max_waiting,
            paused=lambda: self.scheduler.paused,
        )
        outcomes = ("handoffs_held", "handoffs_lost", "handoffs_failed", "refused/dropped")
        self._counts = dict.fromkeys((*outcomes, *COUNTS), 0)

    # Role ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self._port.take():
            if self._sharing.take(event):
                continue
            match event:
                case OwnerUp():
                    self._desk.links[event.address] = (event.path, event.gib_per_s)
                case OwnerDown():
                    self._desk.links.pop(event.address, None)
                case Opened():
                    self._open(event)
                case Granted():
                    self._grant(event)
                case HandoffDropped():
                    self._dropped(event)
        now = time.monotonic()
        for request, _, refusal in self._preparations.take(now):
            self._add(request, refusal)
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
                continue
            handoff = self._prefilling.get(chunk.request.key)
            if handoff is not None:
                self._chunk_done(handoff, chunk)
        now = time.monotonic()
        self._prompts.tick(now)
        self._sharing.ways.tick(now)
        for finished in outcome.finished:
            self._ended(finished)

    def idle(self) -> None:
        self._desk.rest(self, self.check)

    def check(self) -> None:
        """Raises EngineFault where a page or slot is nobody's, or somebody's who has left."""
        lent = [*self._lent.values(), *self._sharing.lent()]
        reads = self._sharing.reads()
        self.scheduler.check_idle({Holder.PUBLICATION: lent, Holder.READ: reads})

    # What the desk asks -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        handed_over = self._bootstrap or self._prefilling or self._inflight or self._lent
        return bool(handed_over or self._pooled or self._sharing.busy or self._tiers.busy)

    def queues(self) -> dict[str, int]:
        return {
            **self.scheduler.queues(),
            **self._preparations.queues(),
            "bootstrap": len(self._bootstrap),
            "inflight": len(self._inflight),
            "pooled": len(self._pooled),
        }

    def waiting_by_class(self) -> Mapping[PriorityClass, int]:
        return self.scheduler.waiting_by_class()

    def handoffs(self) -> list[dict[str, object]]:
        now = time.monotonic()
        open_here = {
            "bootstrap": tuple(self._bootstrap.values()),
            "prefilling": tuple(each.request for each in tuple(self._prefilling.values())),
            "inflight": tuple(each.request for each in tuple(self._inflight.values())),
        }
        return [
            {
                "queue": queue,
                "request_id": request.request_id,
                "serial": request.key,
                "tokens": len(request.token_ids),
                "open_s": now - request.arrived,
            }
            for queue, requests in open_here.items()
            for request in requests
        ]

    def counters(self) -> dict[str, int]:
        return {
            **self.scheduler.counters(),
            **self._counts,
            **self._sharing.counters(),
            "pooled_prompts": self._pooled.num_pooled,
        }

    def distributions(self) -> Mapping[str, Counted]:
        return {}

    def backlogs(self) -> dict[str, Backlog]:
        return {"prompts": self._prompts.backlog}

    def abort(self, request_id: str) -> int:
        """Gives up every hand-off, and every prompt to be pooled, of this client request."""
        requests = {
            **self._bootstrap,
            **{serial: handoff.request for serial, handoff in self._prefilling.items()},
            **{serial: handoff.request for serial, handoff in self._inflight.items()},
        }
        doomed = [serial for serial, each in requests.items() if each.request_id == request_id]
        for serial in doomed:
            self._fail(serial, "aborted by an operator", retryable=False)
        return len(doomed) + self._pooled.abort(request_id)

    def abort_all(self) -> int:
        """Of hand-offs their readers are told to do without: whether requests end is theirs."""
        self._give_up_all()
        return self._pooled.abort_all(PAUSED)

    def let_go(self) -> bool:
        """What is computed already is read to the end."""
        self._give_up_all()
        self.scheduler.start_over()
        return not (self._lent or self._sharing.fetches.busy)

    def renew(self) -> None:
        self._pooled.renew()

    def pair_as(self, weights: WeightsId) -> None:
        self._port.post(ComputesWith(weights))
        self._desk.links.clear()

    def _give_up_all(self) -> None:
        for serial in (*self._bootstrap, *self._prefilling):
            self._fail(serial, "this prefill node is paused", retryable=True)

    # What comes and ends ------------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        match message:
            case PoolPrompts():
                self._pooled.take(message, draining=self._desk.draining)
            case CancelPooling(number=number):
                self._pooled.cancel(number)

    def _ended(self, finished: Finished) -> None:
        if finished.request.pooling is not None:
            self._pooled.ended(finished.request, finished.finish)
        else:
            self._ended_unpublished(finished.request, finished.finish)

    def explain(self, request_id: str) -> Flights:
        return self._records.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, Flight]]:
        return self._records.flights(num_ended)

    # A hand-off's way ---------------------------------------------------------------------------

    def _open(self, event: Opened) -> None:
        now = time.monotonic()
        self._records.open(event, now)
        num_waiting = len(self._bootstrap) + len(self._preparations) + self.scheduler.num_waiting
        try:
            start_by = self._door.take(event, num_waiting, now)
            request = _request_of(event, start_by, now)
            self._adapters.hold(request)
        except ServingError as refusal:
            return self._refuse(event.serial, refusal)
        self._bootstrap[event.serial] = request
        if event.prefix_at:
            room, queued_s = self.scheduler.room().num_pages, self._prompts.queued_s
            self._sharing.fetch(request, event.prefix_at, room=room, queued_s=queued_s)

    def _grant(self, event: Granted) -> None:
        request = self._bootstrap.pop(event.serial, None)
        if request is None:
            return  # failed here before the grant arrived; HandoffDropped is under way
        stamps = self._records[event.serial]
        stamps.granted, stamps.prefix_tokens = time.monotonic(), event.prefix_tokens
        self._prefilling[event.serial] = Prefilling(
            serial=event.serial,
            request=request,
            prefix_tokens=event.prefix_tokens,
            published=event.prefix_tokens,
            holding=Holding.none(self._tables.num_tables),
        )
        place = Place(request.due, len(request.token_ids), request.priority)
        self._prompts.join(event.serial, place, time.monotonic())
        try:
            self._preparations.put(request, None)
        except ServingError as refusal:
            self._refuse(request.key, refusal)

    def _add(self, request: Request, refusal: ServingError | None) -> None:
        """One that is prepared, or cannot be."""
        try:
            if refusal is not None:
                raise refusal
            self.scheduler.add(request)
        except ServingError as error:
            self._refuse(request.key, error)

    def _refuse(self, serial: int, error: ServingError) -> None:
        refusal = refusal_of(error)
        self._counts[refusal.count] += 1
        self._fail(serial, str(error), retryable=refusal.retryable, retry_after_s=error.late_s)

    def _admitted(self, request: Request, holding: Holding) -> None:
        """The scheduler has reserved the whole prompt and locked what this node has of it."""
        if request.pooling is not None:
            return
        handoff = self._prefilling[request.key]
        handoff.holding = holding
        num_tokens = len(request.token_ids)
        lent = holding.take(self._tables.handed_over(num_tokens, handoff.prefix_tokens))
        self._tokens.drop(handoff.serial)
        self._sharing.admitted(request)
        stamps = self._records[handoff.serial]
        stamps.admitted, stamps.cached_tokens = request.admitted, request.cached_tokens
        stamps.bringing = request.bringing
        self._pages.hold(lent, Holder.PUBLICATION)
        self._lent[handoff.serial] = lent
        self._port.post(
            Admit(
                handoff.serial,
                compute_tokens=num_tokens - request.cached_tokens,
                queued_tokens=self.scheduler.queued_tokens(),
            )
        )
        # Whole pages: where tokens generated before are cached too, this counts the prompt alone.
        self._publish(handoff, self._whole_pages(request.cached_tokens))

    def _chunk_done(self, handoff: Prefilling, chunk: ChunkDone) -> None:
        self._records[handoff.serial].num_chunks += 1
        num_left = len(chunk.request.token_ids) - chunk.end
        self._prompts.serve(handoff.serial, num_left)
        self._sharing.ways.computed(handoff.serial, num_left)
        if chunk.first_token is None:
            self._publish(handoff, self._whole_pages(chunk.end))
            return
        del self._prefilling[handoff.serial]
        self._inflight[handoff.serial] = handoff
        self._adapters.release(handoff.serial)
        self._records[handoff.serial].done = time.monotonic()
        self._publish(handoff, chunk.end, chunk)

    def _publish(self, handoff: Prefilling, end: int, last_chunk: ChunkDone | None = None) -> None:
        """Publishes [handoff.published, end), page aligned unless it is the last range. The reader
        may have a longer prefix than that already: then only the last, empty range tells."""
        start, last = handoff.published, last_chunk is not None
        if end <= start and not last:
            return
        num_tokens = len(handoff.request.token_ids)
        spans = self._tables.spans(num_tokens, handoff.prefix_tokens, start, end, last=last)
        self._port.post(
            Publish(
                handoff.serial,
                start=start,
                end=end,
                pages=handoff.holding.take(spans),
                last=last,
                first_token=last_chunk.first_token if last_chunk else None,
                times=self._records[handoff.serial].times() if last else None,
                logprobs=last_chunk.logprobs if last_chunk else None,
                prompt_logprobs=last_chunk.prompt_logprobs if last_chunk else None,
            )
        )
        handoff.published = end

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self._tables.page_size * self._tables.page_size

    def _ended_unpublished(self, request: Request, finish: Finish) -> None:
        if request.key in self._prefilling:  # else it ended with its first token, or was dropped
            self._counts["refused/dropped"] += bool(finish.retry_after_s)
            self._fail(
                request.key,
                finish.error or finish.reason.name.lower(),
                retryable=False,
                retry_after_s=finish.retry_after_s,
            )

    def _fail(
        self, serial: int, reason: str, *, retryable: bool, retry_after_s: float = 0.0
    ) -> None:
        self._counts["handoffs_failed"] += 1
        self._forget(serial, Finish(FinishReason.ABORT, reason))
        self._port.post(FailHandoff(serial, reason, retryable, retry_after_s))

    def _dropped(self, event: HandoffDropped) -> None:
        self._counts["handoffs_held" if event.held else "handoffs_lost"] += 1
        self._records.close(event)
        self._forget(event.serial, Finish(FinishReason.ABORT, event.reason))
        lent = self._lent.pop(event.serial, None)
        if lent is not None:
            self._pages.drop(lent, Holder.PUBLICATION)

    def _forget(self, serial: int, finish: Finish) -> None:
        """Takes a hand-off out of its queue; its compute stops at the chunk's edge."""
        self._tokens.drop(serial)
        self._prompts.leave(serial)
        self._sharing.forget(serial)
        self._bootstrap.pop(serial, None)
        self._inflight.pop(serial, None)
        handoff = self._prefilling.pop(serial, None)
        if handoff is not None:
            self._preparations.remove(handoff.request)
            self.scheduler.abort(handoff.request, finish)
        self._adapters.release(serial)


def _request_of(event: Opened, start_by: float, now: float) -> Request:
    request = Request(
        key=event.serial,
        origin=(0, 0),
        request_id=event.request_id,
        token_ids=event.token_ids,
        num_prompt=len(event.token_ids) - event.num_generated,
        # The first token is all this node samples.
        sampling=msgspec.structs.replace(event.sampling, max_tokens=event.num_generated + 1),
        deadline=now + event.budget_s,
        arrived=now,
        start_by=start_by,
        priority=event.priority,
        routing_key=event.routing_key,
        namespace=event.namespace,
        adapter=event.adapter,
        images=event.images,
    )
    request.suspect_of(event.engine_deaths)
    return request
