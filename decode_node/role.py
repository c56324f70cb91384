"""The decode node's role: prealloc queue -> transfer queue -> running batch.

    submitted --(an owner is paired)--> prealloc queue --grant--> transfer queue --held--> running
        |           ^                       |  lost: next owner, then local     |
        |---> unpaired (owners just lost) <-+-----------------------------------|
        `--(colocated, short, no owner)-----+-----------------------------------+--> waiting queue

This node is responsible for a request from submission to last token. What it has lost it can
always prefill itself. This module knows nothing of streams and sockets: the router is behind the
desk and the outbox, the owners are behind a ReaderPort.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from grpc import StatusCode

from common.config import DecodeConfig
from common.distribution import Counted
from common.drain import Backlog, Drain, Place, may_wait_s
from common.engine.memory.pages import Holder, PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.rows.batch import BatchResult, ScheduleBatch
from common.engine.rows.held_tokens import HeldTokens
from common.engine.rows.limits import RequestLimits
from common.engine.rows.request import (
    Finish,
    FinishReason,
    Ints,
    Request,
    out_of_time,
    waited_too_long,
)
from common.engine.schedule.scheduler import ChunkDone, Finished, Scheduler
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueTooLong,
    ServingError,
)
from common.log_throttle import Throttle, ThrottledLog
from common.node.desk import Desk
from common.node.messages import (
    CancelSubmitted,
    Ended,
    FrontMessage,
    OnTrial,
    StreamEnded,
    SubmitRequest,
)
from common.node.outbox import Outbox
from common.node.stamps import AttemptStamps, RequestStamps
from common.trial import GUILTY, MAX_DEATHS
from decode_node.answer_pace import AnswerPace
from decode_node.counts import DecodeCounts
from decode_node.open_handoffs import open_handoffs
from decode_node.queues import Attempt, PreallocQueue, Transfer, TransferQueue
from decode_node.unpaired import Unpaired, Waiter
from kvtransfer.messages import HandoffId
from kvtransfer.ports import (
    CancelHandoff,
    FirstToken,
    GrantHandoff,
    HandoffAdmitted,
    Held,
    Lost,
    OpenHandoff,
    OwnerDown,
    OwnerUp,
    ReaderPort,
    ReadsEnded,
)

log = logging.getLogger(__name__)

DEADLINE_CHECK_S = 0.1
# As many requests and tokens may wait here before one is refused whose client has tokens already:
# all that another node had, when that one dies.
REPLAYS_TIMES = 2


class DecodeRole:
    """Engine thread only."""

    def __init__(
        self,
        *,
        config: DecodeConfig,
        instance: int,
        scheduler: Scheduler,
        pages: PageAllocator,
        cache: RadixCache,
        page_size: int,
        page_bytes: int,
        limits: RequestLimits,
        port: ReaderPort,
        desk: Desk,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._instance = instance
        self._scheduler = scheduler
        self._pages = pages
        self._cache = cache
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._limits = limits
        self._port = port
        self._desk = desk
        self._outbox = outbox
        self._max_granted_pages = config.max_granted_pages or pages.num_pages // 2
        self._owners: dict[str, int] = {}  # address: instance, of usable links
        self._live: dict[tuple[int, int], Request] = {}  # by origin
        # Of all requests here: what fits into the pool, and what may wait for it.
        most_tokens = config.engine.scheduler.max_waiting_tokens + pages.num_pages * page_size
        self._tokens = HeldTokens(most_tokens)
        self._stamps: dict[int, RequestStamps] = {}  # by request key
        self._unpaired = Unpaired(config.pair_again_s)
        self._prealloc = PreallocQueue()
        self._transfer = TransferQueue()
        self._current: dict[int, HandoffId] = {}  # request key: its attempt, in either queue
        self._attempts: dict[int, int] = {}  # request key: attempts so far
        self._prompts = Drain()  # to be computed here
        self._waits = Drain()  # for pages, in pages: the prealloc queue
        self._answers = AnswerPace()
        self._reading: dict[HandoffId, Ints] = {}  # pages held until nothing can land in them
        self._told_trial: Request | None = None
        self._next_key = 1
        self._deadlines_due = 0.0
        self._counts = DecodeCounts()
        self._log = ThrottledLog(log, Throttle(most=100))

    # Role ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        now = time.monotonic()
        lost: list[Lost] = []
        for event in self._port.take():
            match event:
                case OwnerUp():
                    self._owners[event.address] = event.owner
                    self._desk.links[event.address] = (event.path, event.gib_per_s)
                    self._counts.link(up=True)
                case OwnerDown():
                    if self._owners.get(event.address) == event.owner:
                        del self._owners[event.address], self._desk.links[event.address]
                        self._unpaired.owner_lost(event.address, now)
                        self._counts.link(up=False)
                case HandoffAdmitted():
                    self._admitted(event)
                case FirstToken():
                    self._first_token(event)
                case Held():
                    self._held(event)
                case Lost():
                    lost.append(event)
                case ReadsEnded():
                    self._pages.drop(self._reading.pop(event.id), Holder.READ)
        for event in lost:  # now: which owners are left is known
            self._lost(event)
        for finished in self._scheduler.expire(now, self._prompts.queued_s):
            self._counts.dropped(finished.finish)
            self._end(finished.request, finished.finish)
        self._desk.poll(self, self._take)
        self._pair_again(now)
        self._join()
        self._grant(now)
        self._waits.tick(now)
        self._keep_room()
        self._expire(now)
        self._outbox.flush()

    def next_batch(self) -> ScheduleBatch | None:
        batch = self._scheduler.next_batch()
        if self._scheduler.on_trial is not self._told_trial:
            self._tell_trial(self._scheduler.on_trial)
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome = self._scheduler.finish(batch, result)
        self._outbox.tokens(outcome.streams, outcome.requests, outcome.tokens)
        for chunk in outcome.chunks:
            self._stamp_chunk(chunk)
            self._prompts.serve(chunk.request.key, len(chunk.request.token_ids) - chunk.end)
            if chunk.first_token is not None:
                self._outbox.begin(chunk.request.origin, chunk.request.cached_tokens)
        now = time.monotonic()
        self._prompts.tick(now)
        for finished in outcome.finished:
            self._note_length(finished, now)
            self._end(finished.request, finished.finish)
        self._outbox.flush()

    def idle(self) -> None:
        self._desk.rest(self, self.check)

    def check(self) -> None:
        """Raises EngineFault where a page or slot is nobody's, or somebody's who has left."""
        joining = [transfer.pages for transfer in self._transfer]
        self._scheduler.check_idle({Holder.REQUEST: joining, Holder.READ: self._reading.values()})

    # What the desk asks -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._live or self._reading)

    def queues(self) -> dict[str, int]:
        return {
            **self._scheduler.queues(),
            "unpaired": len(self._unpaired),
            "prealloc": len(self._prealloc),
            "transfer": len(self._transfer),
        }

    def handoffs(self) -> list[dict[str, object]]:
        return open_handoffs(self._unpaired, self._prealloc, self._transfer)

    def counters(self) -> dict[str, int]:
        return {**self._scheduler.counters(), **self._counts.totals()}

    def distributions(self) -> Mapping[str, Counted]:
        return self._counts.distributions()

    @property
    def num_host_pages_used(self) -> int:
        return self._scheduler.num_host_pages_used

    def backlogs(self) -> dict[str, Backlog]:
        return {"prompts": self._prompts.backlog, "pages": self._waits.backlog}

    def flush_cache(self) -> int:
        return self._scheduler.flush_cache()

    def abort(self, request_id: str) -> int:
        doomed = [request for request in self._live.values() if request.request_id == request_id]
        for request in doomed:
            self._abort(request, Finish(FinishReason.ABORT, "aborted by an operator"))
        return len(doomed)

    # What the router sends ----------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        cancelled = Finish(FinishReason.ABORT, "cancelled")
        match message:
            case SubmitRequest():
                self._submit(message)
            case CancelSubmitted(stream, number):
                request = self._live.get((stream, number))
                if request is not None:
                    self._abort(request, cancelled)
            case StreamEnded(stream):
                for origin, request in list(self._live.items()):
                    if origin[0] == stream:
                        self._abort(request, cancelled)

    def _submit(self, message: SubmitRequest) -> None:
        now = time.monotonic()
        token_ids = np.frombuffer(message.token_ids, np.int32)
        request = Request(
            key=self._next_key,
            origin=(message.stream, message.request),
            request_id=message.request_id,
            token_ids=token_ids,
            num_prompt=len(token_ids) - message.num_generated,
            sampling=message.sampling,
            deadline=now + message.budget_s,
            arrived=now,
            start_by=now + self._may_wait_s(message, len(token_ids)),
            namespace=message.namespace,
        )
        request.suspect_of(message.engine_deaths)
        self._next_key += 1
        self._stamps[request.key] = RequestStamps(
            message.request_id, request.num_prompt, message.trace, message.received or now, now
        )
        try:
            if request.origin in self._live:
                raise InvalidRequest(f"request {message.request} is live on this stream already")
            if self._desk.draining:
                raise NodeUnavailable("this decode node is draining")
            times = REPLAYS_TIMES if message.num_generated else 1
            if self._num_waiting >= times * self._config.engine.scheduler.max_waiting:
                raise Overloaded(f"{self._num_waiting} requests wait here already")
            self._limits.check(token_ids)
            self._tokens.take(request.key, len(token_ids), times=times)
            self._live[request.origin] = request
            self._dispatch(request, message.prefill_addresses)
        except ServingError as error:
            self._refuse(request, error)

    @property
    def _num_waiting(self) -> int:
        """For pages, in either queue, or for an owner. Whoever is let in may go from one to
        another."""
        return len(self._unpaired) + len(self._prealloc) + self._scheduler.num_waiting

    def _may_wait_s(self, message: SubmitRequest, num_tokens: int) -> float:
        """For its turn; without end, of an answer that goes on: its client has part of it."""
        if message.num_generated:
            return math.inf
        work_s = num_tokens * self._prompts.unit_s
        work_s += self._answers.seconds(message.sampling.max_tokens)
        return may_wait_s(message.queue_s, message.budget_s, work_s)

    # A request's way ----------------------------------------------------------------------------

    def _dispatch(self, request: Request, candidates: tuple[str, ...]) -> None:
        """Opens a hand-off at the first usable candidate, has it wait for one, or prefills here.

        Raises:
            DeadlineExceeded: no time is left.
            QueueTooLong: its turn would come too late.
        """
        now = time.monotonic()
        if request.deadline <= now:
            raise DeadlineExceeded(out_of_time().error)
        attempt = self._attempts.get(request.key, 0) + 1
        usable = [address for address in candidates if address in self._owners]
        if not usable and self._waits_for_an_owner(request, attempt, candidates):
            return
        here = self._why_here(request, attempt, usable)
        num_pages = len(request.token_ids) // self._page_size + 1
        if here:
            self._prompts.check(Place(request.start_by, len(request.token_ids)), now)
            self._prompts.join(request.key, Place(request.turn, len(request.token_ids)), now)
            self._counts.local_prefill(here)
            self._stamps[request.key].queued = now
            self._scheduler.add(request)
            return
        self._waits.check(Place(request.start_by, num_pages), now)
        address = usable[0]
        handoff_id = HandoffId(self._instance, request.key, attempt)
        self._attempts[request.key] = attempt
        self._current[request.key] = handoff_id
        stamps = AttemptStamps(address, self._desk.links[address][0], opened=now)
        self._stamps[request.key].open(stamps)
        self._prealloc.put(Attempt(handoff_id, request, candidates, num_pages, now, stamps))
        self._waits.join(request.key, Place(-math.inf, num_pages), now)
        self._counts.opened(attempt)
        self._port.post(
            OpenHandoff(
                id=handoff_id,
                owner=self._owners[address],
                token_ids=request.token_ids,
                num_generated=request.num_generated,
                sampling=request.sampling,
                budget_s=request.deadline - now,
                request_id=request.request_id,
                traceparent=self._stamps[request.key].trace.passed_on,
                namespace=request.namespace,
                engine_deaths=request.engine_deaths,
                queue_s=max(request.start_by - now, 0.0),
            )
        )

    def _waits_for_an_owner(
        self, request: Request, attempt: int, candidates: tuple[str, ...]
    ) -> bool:
        """Has it wait for an owner, if one of these may soon be paired again."""
        until = min(self._unpaired.worth_until(candidates), request.deadline)
        retries_left = attempt <= self._config.retries + 1
        if not retries_left or time.monotonic() >= until or self._short(request):
            return False
        self._unpaired.append(Waiter(request, candidates, until))
        return True

    def _why_here(self, request: Request, attempt: int, usable: Sequence[str]) -> str:
        """Why it is to be prefilled here, as DecodeCounts names it; empty: it is not."""
        if self._config.mode == "colocated":
            return "colocated"
        if attempt > self._config.retries + 1 or (attempt > 1 and not usable):
            return "exhausted"
        if not usable:
            return "no_owner"
        return "short" if self._short(request) else ""

    def _short(self, request: Request) -> bool:
        longest = self._config.local_prefill_tokens
        if not longest:
            return False
        cached = self._cache.match(request.token_ids[:-1], request.namespace).num_tokens
        return len(request.token_ids) - cached <= longest

    def _pair_again(self, now: float) -> None:
        for waiter in self._unpaired.take(now, self._owners):
            try:
                self._dispatch(waiter.request, waiter.candidates)
            except ServingError as error:
                self._refuse(waiter.request, error)

    def _grant(self, now: float) -> None:
        """Reserves all pages of as many waiting attempts as there is room for, and grants them."""
        if self._scheduler.num_retracted:
            return  # what was taken off the device comes back before anything new
        while (attempt := self._next_fitting(now)) is not None:
            token_ids = attempt.request.token_ids
            prefix = self._cache.match(token_ids, attempt.request.namespace)
            self._pages.hold(prefix.pages, Holder.REQUEST)
            num_pages = -(-len(token_ids) // self._page_size)
            fresh = self._scheduler.allocate(num_pages - len(prefix.pages), Holder.REQUEST)
            if fresh is None:  # what seemed evictable hangs below something held
                self._pages.drop(prefix.pages, Holder.REQUEST)
                self._prealloc.put(attempt)
                break
            self._pages.hold(fresh, Holder.READ)
            self._reading[attempt.id] = fresh
            pages = np.concatenate([prefix.pages, fresh])
            growth_pages = self._scheduler.growth_pages(attempt.request)
            attempt.stamps.granted = time.monotonic()
            self._waits.serve(attempt.request.key)
            self._transfer.append(Transfer(attempt, pages, prefix.num_tokens, growth_pages))
            self._port.post(GrantHandoff(attempt.id, prefix.num_tokens, fresh))
        num_unready = self._transfer.num_unready(self._max_granted_pages)
        self._scheduler.barrier = self._prealloc.barrier(now, num_unready)

    def _next_fitting(self, now: float) -> Attempt | None:
        if not len(self._prealloc):
            return None
        self._keep_room()
        room, claim = self._scheduler.room(), self._scheduler.claim
        num_unready = self._transfer.num_unready(self._max_granted_pages)
        return self._prealloc.take_fitting(now, room, num_unready, claim)

    def _keep_room(self) -> None:
        """For those that have their pages, and are going to join."""
        self._scheduler.kept_slots = len(self._transfer)
        self._scheduler.kept_pages = self._transfer.growth_pages()

    def _admitted(self, event: HandoffAdmitted) -> None:
        transfer = self._transfer.get(event.id)
        if transfer is not None:
            transfer.owner_cached_tokens = (
                len(transfer.attempt.request.token_ids) - event.compute_tokens
            )

    def _first_token(self, event: FirstToken) -> None:
        """Told to the client at once, before its KV has landed."""
        transfer = self._transfer.get(event.id)
        if transfer is None:
            return
        if event.token >= self._limits.vocabulary_size:
            reason = f"its first token is {event.token}, outside the vocabulary"
            self._port.post(CancelHandoff(event.id, reason))
            self._lost(Lost(event.id, reason, retryable=True))
            return
        request, stamps = transfer.attempt.request, transfer.attempt.stamps
        stamps.first_ready, stamps.times = event.first_ready, event.times
        stamps.first_token = time.monotonic()
        self._stamps[request.key].note_first_token(stamps.first_token)
        transfer.first_token = event.token
        request.cached_tokens = max(transfer.prefix_tokens, transfer.owner_cached_tokens)
        self._outbox.begin(request.origin, request.cached_tokens)
        self._outbox.token(request.origin, event.token)
        finish = self._scheduler.finish_of(request, event.token)
        if finish is not None:
            self._give_up(request, "its first token ended the request")
            self._end(request, finish)

    def _held(self, event: Held) -> None:
        transfer = self._transfer.get(event.id)
        if transfer is not None:
            transfer.held = True
            own = transfer.prefix_tokens // self._page_size
            num_read = len(transfer.pages) - own
            stamps, now = transfer.attempt.stamps, time.monotonic()
            self._counts.held(
                now - transfer.attempt.opened,
                pages_read=num_read,
                tokens=len(transfer.attempt.request.token_ids),
                own=transfer.prefix_tokens,
                owner_cached=transfer.owner_cached_tokens,
            )
            stamps.landed, stamps.held = event.landed, now
            stamps.num_pages, stamps.num_bytes = num_read, num_read * self._page_bytes

    def _join(self) -> None:
        """KV and first token are here: into the running batch without a forward."""
        for transfer in self._transfer.held():
            request = self._continued(transfer)
            if not self._scheduler.join(request, transfer.pages):
                return
            self._live[request.origin] = request
            self._transfer.remove(transfer.attempt.id)
            self._settled(request)
            transfer.attempt.stamps.joined = time.monotonic()

    def _lost(self, event: Lost) -> None:
        """A new attempt elsewhere, or here; its tokens are fixed now: prompt and emitted."""
        transfer = self._transfer.get(event.id)
        attempt = transfer.attempt if transfer else self._prealloc.remove(event.id)
        if attempt is None:
            return
        self._counts.lost()
        request = self._continued(transfer) if transfer else attempt.request
        attempt.stamps.lost, attempt.stamps.reason = time.monotonic(), event.reason
        self._log.info(
            "hand-off lost",
            request_id=request.request_id,
            **self._stamps[request.key].trace.log_fields,
            owner=attempt.stamps.prefill,
            because=event.reason,
        )
        if transfer is not None:
            self._transfer.remove(event.id)
            self._pages.drop(transfer.pages, Holder.REQUEST)
        self._waits.leave(request.key)
        del self._current[request.key]
        self._live[request.origin] = request
        if event.engine_died:
            if request.engine_deaths >= MAX_DEATHS:
                self._end(request, Finish(FinishReason.ERROR, GUILTY, StatusCode.INTERNAL))
                return
            request.suspect_of(request.engine_deaths + 1)
        candidates = attempt.candidates if event.retryable else ()
        if not event.may_return:
            candidates = tuple(each for each in candidates if each != attempt.stamps.prefill)
        try:
            if event.retry_after_s:
                self._check_another(request, attempt, candidates, event)
            else:
                request.start_by = math.inf  # it has waited through no fault of its own
            self._dispatch(request, candidates)
        except ServingError as error:
            self._refuse(request, error)

    def _check_another(
        self, request: Request, attempt: Attempt, candidates: Sequence[str], refused: Lost
    ) -> None:
        """After an owner whose queue is too long, which is no reason to prefill it here: those who
        are answered would pay for it.

        Raises:
            QueueTooLong: no other owner is left, or no time.
        """
        usable = [address for address in candidates if address in self._owners]
        here = self._why_here(request, attempt.id.attempt + 1, usable)
        if here or request.start_by <= time.monotonic():
            raise QueueTooLong(refused.reason, refused.retry_after_s)

    @staticmethod
    def _continued(transfer: Transfer) -> Request:
        """The request with the first token, if it has come, as one of its own."""
        request = transfer.attempt.request
        if transfer.first_token is None:
            return request
        token_ids = np.append(request.token_ids, np.int32(transfer.first_token))
        return dataclasses.replace(request, token_ids=token_ids)

    # Ends ---------------------------------------------------------------------------------------

    def _abort(self, request: Request, finish: Finish) -> None:
        if self._unpaired.remove(request):
            self._end(request, finish)
            return
        if request.key in self._current:
            self._give_up(request, finish.error)
            self._end(request, finish)
            return
        finished = self._scheduler.abort(request, finish)
        if finished is not None:
            self._end(finished.request, finished.finish)

    def _give_up(self, request: Request, reason: str) -> None:
        """Ends the attempt under way: told to its owner, its pages dropped but for reads."""
        handoff_id = self._current[request.key]
        self._stamps[request.key].attempts[-1].reason = reason
        self._prealloc.remove(handoff_id)
        self._waits.leave(request.key)
        transfer = self._transfer.remove(handoff_id)
        if transfer is not None:
            self._pages.drop(transfer.pages, Holder.REQUEST)
        self._port.post(CancelHandoff(handoff_id, reason))

    def _settled(self, request: Request) -> None:
        self._current.pop(request.key, None)
        self._attempts.pop(request.key, None)

    def _end(self, request: Request, finish: Finish) -> None:
        self._settled(request)
        self._live.pop(request.origin, None)
        self._tell_end(request, finish)

    def _refuse(self, request: Request, error: ServingError) -> None:
        """Never begun here, or not to be continued: the router hears why."""
        self._counts.refused(error)
        self._settled(request)
        if self._live.get(request.origin) is request:
            del self._live[request.origin]
        retry_after_s = error.retry_after_s if isinstance(error, QueueTooLong) else 0.0
        finish = Finish(FinishReason.ERROR, str(error), error.status, retry_after_s)
        self._tell_end(request, finish)

    def _tell_end(self, request: Request, finish: Finish) -> None:
        self._tokens.drop(request.key)
        self._prompts.leave(request.key)
        stamps = self._stamps.pop(request.key)
        stamps.admitted, stamps.away = request.admitted, request.away
        stamps.ended = time.monotonic()
        stream, number = request.origin
        code, _ = finish.status.value
        reason = int(finish.reason)
        ended = Ended(number, reason, finish.error, code, stamps, finish.retry_after_s)
        self._outbox.end(stream, ended)

    def _note_length(self, finished: Finished, now: float) -> None:
        """Of an answer that came to its own end."""
        stamps = self._stamps[finished.request.key]
        if finished.num_generated and stamps.first_token:
            self._answers.ended(finished.num_generated, now - stamps.first_token)

    # Moments of a request, for its timeline -----------------------------------------------------

    def _stamp_chunk(self, chunk: ChunkDone) -> None:
        """Only the first last chunk counts: a retracted request may be computed anew."""
        stamps = self._stamps[chunk.request.key]
        if chunk.first_token is not None and stamps.queued and not stamps.prefilled:
            stamps.prefilled = time.monotonic()
            stamps.note_first_token(stamps.prefilled)

    def _tell_trial(self, request: Request | None) -> None:
        """Before the step is launched that the engine may die in."""
        self._told_trial = request
        self._desk.notify(OnTrial(*request.origin) if request else OnTrial(0, 0))

    def _expire(self, now: float) -> None:
        """The total budget of requests in the queues here; the scheduler minds its own."""
        if now < self._deadlines_due:
            return
        self._deadlines_due = now + DEADLINE_CHECK_S
        late = [
            attempt.request
            for attempt in (*self._prealloc, *(t.attempt for t in self._transfer))
            if attempt.request.deadline < now
        ]
        for request in late:
            self._abort(request, out_of_time())
        for request in [each.request for each in self._prealloc if each.request.start_by < now]:
            finish = waited_too_long(self._waits.queued_s)
            self._counts.dropped(finish)
            self._abort(request, finish)
