"""Hand-offs on their way: opened at an owner, granted pages here, told a first token, held, joined.

    open -> prealloc queue --grant--> transfer queue --held--> running batch
                 `---------lost-----------'  `--first token ended it--> ended

Every request has one attempt under way at most. Which owner it goes to, and what becomes of one
that has lost its attempt, is for the dispatcher to say.
"""

import logging
import math
import time
from dataclasses import dataclass

from common.engine.rows.request import Finish, Request, out_of_time, waited_too_long
from common.engine.schedule.scheduler import Scheduler
from common.logs.throttle import Throttle, ThrottledLog
from common.node.stamps import AttemptStamps
from common.queueing.drain import Backlog, Drain
from common.queueing.waiting_line import Place
from decode_node.counts import DecodeCounts
from decode_node.destinations import Destinations
from decode_node.live import LiveRequests
from decode_node.queues import Attempt, PreallocQueue, Transfer, TransferQueue
from kvtransfer.messages import HandoffId
from kvtransfer.ports import (
    CancelHandoff,
    FirstToken,
    GrantHandoff,
    HandoffAdmitted,
    Held,
    Lost,
    OpenHandoff,
    OwnerUp,
    ReaderPort,
)

log = logging.getLogger(__name__)

DEADLINE_CHECK_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LostHandoff:
    """An attempt that is over; its request holds nothing, and has the tokens that are out."""

    request: Request
    attempt: Attempt
    event: Lost


class Handoffs:
    """Engine thread only.

    Attributes:
        prealloc: attempts that wait for pages.
        transfer: granted ones.
    Args:
        instance: this node's, which its attempts are known by at owners.
        max_granted_pages: of attempts that have no first token yet.
    """

    def __init__(
        self,
        *,
        instance: int,
        vocabulary_size: int,
        max_granted_pages: int,
        port: ReaderPort,
        scheduler: Scheduler,
        destinations: Destinations,
        live: LiveRequests,
        counts: DecodeCounts,
    ) -> None:
        self._instance = instance
        self._vocabulary_size = vocabulary_size
        self._max_granted_pages = max_granted_pages
        self._port = port
        self._scheduler = scheduler
        self._destinations = destinations
        self._live = live
        self._counts = counts
        self.prealloc = PreallocQueue()
        self.transfer = TransferQueue()
        self._current: dict[int, HandoffId] = {}  # by request key, in either queue
        self._waits = Drain()  # for pages, in pages: the prealloc queue
        self._deadlines_due = 0.0
        self._log = ThrottledLog(log, Throttle(most=100))

    @property
    def backlog(self) -> Backlog:
        """Of those that wait for pages."""
        return self._waits.backlog

    def open(
        self, request: Request, owner: OwnerUp, candidates: tuple[str, ...], number: int
    ) -> None:
        """
        Args:
            number: of the attempt; no other of this request has it.
        Raises:
            QueueTooLong: it would get its pages too late.
        """
        now = time.monotonic()
        tables, num_tokens = self._destinations.tables, len(request.token_ids)
        # A page's edge may leave more behind a window than the next token takes.
        num_pages = max(tables.pages_for(num_tokens), tables.pages_for(num_tokens + 1))
        self._waits.check(Place(request.start_by, num_pages), now)
        handoff_id = HandoffId(self._instance, request.key, number)
        self._current[request.key] = handoff_id
        stamps = AttemptStamps(owner.address, owner.path, opened=now)
        told = self._live.stamps(request)
        told.open(stamps)
        self.prealloc.put(Attempt(handoff_id, request, candidates, num_pages, now, stamps))
        self._waits.join(request.key, Place(-math.inf, num_pages), now)
        self._counts.opened(number)
        self._port.post(
            OpenHandoff(
                id=handoff_id,
                owner=owner.owner,
                token_ids=request.token_ids,
                num_generated=request.num_generated,
                sampling=request.sampling,
                budget_s=request.deadline - now,
                request_id=request.request_id,
                traceparent=told.trace.passed_on,
                namespace=request.namespace,
                engine_deaths=request.engine_deaths,
                queue_s=max(request.start_by - now, 0.0),
            )
        )

    # Pages --------------------------------------------------------------------------------------

    def grant(self, now: float) -> None:
        """Reserves all pages of as many waiting attempts as there is room for, and grants them."""
        if not self._scheduler.num_retracted:  # what was taken off the device comes back first
            while (attempt := self._next_fitting(now)) is not None:
                if not self._grant(attempt):
                    self.prealloc.put(attempt)
                    break
            num_unready = self.transfer.num_unready(self._max_granted_pages)
            self._scheduler.barrier = self.prealloc.barrier(now, num_unready)
        self._waits.tick(now)
        self._keep_room()

    def _next_fitting(self, now: float) -> Attempt | None:
        if not len(self.prealloc):
            return None
        self._keep_room()
        room, claim = self._scheduler.room(), self._scheduler.claim
        num_unready = self.transfer.num_unready(self._max_granted_pages)
        return self.prealloc.take_fitting(now, room, num_unready, claim)

    def _grant(self, attempt: Attempt) -> bool:
        destination = self._destinations.reserve(attempt.id, attempt.request)
        if destination is None:
            return False
        attempt.stamps.granted = time.monotonic()
        self._waits.serve(attempt.request.key)
        growth_pages = self._scheduler.growth_pages(attempt.request)
        self.transfer.append(Transfer(attempt, destination, growth_pages))
        self._port.post(GrantHandoff(attempt.id, destination.prefix_tokens, destination.fresh))
        return True

    def _keep_room(self) -> None:
        """For those that have their pages, and are going to join."""
        self._scheduler.kept_slots = len(self.transfer)
        self._scheduler.kept_pages = self.transfer.growth_pages()

    # What the owner and the reads say -----------------------------------------------------------

    def admitted(self, event: HandoffAdmitted) -> None:
        transfer = self.transfer.get(event.id)
        if transfer is not None:
            num_tokens = len(transfer.attempt.request.token_ids)
            transfer.owner_cached_tokens = num_tokens - event.compute_tokens

    def first_token(self, event: FirstToken) -> LostHandoff | None:
        """Told to the client at once, before its KV has landed. Returns what is lost for a token
        that is none."""
        transfer = self.transfer.get(event.id)
        if transfer is None:
            return None
        request, stamps = transfer.attempt.request, transfer.attempt.stamps
        reason = ""
        if event.token >= self._vocabulary_size:
            reason = f"its first token is {event.token}, outside the vocabulary"
        elif not _as_asked(request, event):
            reason = "its first token came without the log-probabilities that were asked for"
        if reason:
            self._port.post(CancelHandoff(event.id, reason))
            return self.lost(Lost(event.id, reason, retryable=True))
        stamps.first_ready, stamps.times = event.first_ready, event.times
        stamps.first_token = time.monotonic()
        self._live.stamps(request).note_first_token(stamps.first_token)
        transfer.first_token = event.token
        prefix_tokens = transfer.destination.prefix_tokens
        request.cached_tokens = max(prefix_tokens, transfer.owner_cached_tokens)
        self._live.tell_first_token(request, event.token, event.logprobs, event.prompt_logprobs)
        finish = self._scheduler.finish_of(request, event.token)
        if finish is not None:
            self.give_up(request, "its first token ended the request")
            self._live.end(request, finish)
        return None

    def held(self, event: Held) -> None:
        transfer = self.transfer.get(event.id)
        if transfer is None:
            return
        transfer.held = True
        attempt, destination = transfer.attempt, transfer.destination
        stamps, now, num_read = attempt.stamps, time.monotonic(), len(destination.fresh)
        self._counts.held(
            now - attempt.opened,
            pages_read=num_read,
            tokens=len(attempt.request.token_ids),
            own=destination.prefix_tokens,
            owner_cached=transfer.owner_cached_tokens,
        )
        stamps.landed, stamps.held = event.landed, now
        stamps.num_pages = num_read
        stamps.num_bytes = num_read * self._destinations.page_bytes

    def join(self) -> None:
        """KV and first token are here: into the running batch without a forward."""
        for transfer in self.transfer.held():
            request = transfer.continued()
            if not self._scheduler.join(request, transfer.destination.holding):
                return
            self._live.goes_on(request)
            self.transfer.remove(transfer.attempt.id)
            del self._current[request.key]
            transfer.attempt.stamps.joined = time.monotonic()

    # Attempts that come to nothing --------------------------------------------------------------

    def lost(self, event: Lost) -> LostHandoff | None:
        """None: it was given up before."""
        transfer = self.transfer.remove(event.id)
        attempt = transfer.attempt if transfer else self.prealloc.remove(event.id)
        if attempt is None:
            return None
        self._counts.lost()
        request = transfer.continued() if transfer else attempt.request
        attempt.stamps.lost, attempt.stamps.reason = time.monotonic(), event.reason
        self._log.info(
            "hand-off lost",
            request_id=request.request_id,
            **self._live.stamps(request).trace.log_fields,
            owner=attempt.stamps.prefill,
            because=event.reason,
        )
        if transfer is not None:
            self._destinations.drop(transfer.destination)
        self._waits.leave(request.key)
        del self._current[request.key]
        self._live.goes_on(request)
        return LostHandoff(request, attempt, event)

    def give_up(self, request: Request, reason: str) -> bool:
        """Ends the attempt under way: told to its owner, its pages dropped but for reads. False:
        there is none."""
        handoff_id = self._current.pop(request.key, None)
        if handoff_id is None:
            return False
        self._live.stamps(request).attempts[-1].reason = reason
        self.prealloc.remove(handoff_id)
        self._waits.leave(request.key)
        transfer = self.transfer.remove(handoff_id)
        if transfer is not None:
            self._destinations.drop(transfer.destination)
        self._port.post(CancelHandoff(handoff_id, reason))
        return True

    def expire(self, now: float) -> None:
        """Ends what is past its budget, and what waits for pages and can no longer be in time;
        looks every DEADLINE_CHECK_S only."""
        if now < self._deadlines_due:
            return
        self._deadlines_due = now + DEADLINE_CHECK_S
        under_way = (*self.prealloc, *(each.attempt for each in self.transfer))
        for attempt in under_way:
            if attempt.request.deadline < now:
                self._end(attempt.request, out_of_time())
        for attempt in self.prealloc:
            if attempt.request.start_by < now:
                finish = waited_too_long(self._waits.queued_s)
                self._counts.dropped(finish)
                self._end(attempt.request, finish)

    def _end(self, request: Request, finish: Finish) -> None:
        self.give_up(request, finish.error)
        self._live.end(request, finish)


def _as_asked(request: Request, event: FirstToken) -> bool:
    """Whether there are as many log-probabilities as the request asks for."""
    told = [0 if each is None else len(each) for each in (event.logprobs, event.prompt_logprobs)]
    wanted = [
        int(request.sampling.logprobs >= 0),
        request.num_prompt - 1 if request.sampling.prompt_logprobs >= 0 else 0,
    ]
    return told == wanted
