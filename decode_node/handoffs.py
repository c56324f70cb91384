"""Hand-offs in progress: opened at a producer, granted pages, first token, completed, joined.

    open -> prealloc queue --grant--> transfer queue --held--> running batch
                 `---------lost-----------'  `--first token ended it--> ended

If several requests have the same prompt (choices with n > 1), one goes first. Once its KV is here,
the others share its whole pages. For each of them only the rest, at most one page, is computed and
transferred.

A migration from another decode node uses the same path. The client is sent nothing before the
hand-off is completed: until then the request runs at its source. A failed attempt ends it here.

Each request has at most one attempt in progress. The dispatcher chooses the producer and decides
how to continue after a failed attempt.
"""

import dataclasses
import hashlib
import logging
import math
import time
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from common.errors import NodeUnavailable
from common.logs.throttle import Throttle, ThrottledLog
from common.queueing.drain import QueueBacklog, QueueEstimator
from common.queueing.waiting_line import QueueEntry
from common.request import Remaining
from decode_node.active_requests import ActiveRequests
from decode_node.counts import DecodeCounters
from decode_node.page_reservations import PageReservations
from decode_node.queues import GrantedHandoff, HandoffAttempt, PreallocQueue, TransferQueue
from engine.batch.request import Request, RequestEnd, out_of_time, waited_too_long
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import HandoffId, Live, Prompt, Source
from kvtransfer.ports import (
    CancelCommand,
    CompletedEvent,
    ConsumerCommands,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    OpenCommand,
    ProducerUp,
    QueuedEvent,
)
from node.timings import HandoffTimings

log = logging.getLogger(__name__)

DEADLINE_CHECK_S = 0.1
# A computed prompt is read within this time. Later, other requests do not wait for its pages.
READ_SOON_S = 2.0
# Migration to this node: longest wait for pages, and for the source to stop the request. The client
# is not affected: the request runs on during both waits, or pauses for one step.
MOVE_WAIT_S = 2.0
MOST_GROWTH = 512  # tokens generated during these waits
# Longest delay of a launch for further migrations, once the first of several is about to arrive.
LAUNCH_WAITS_S = 0.008
# The budget may have expired since the check, but the protocol needs more than 0.
_LEAST_BUDGET_S = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class FailedHandoff:
    """A failed attempt. Its request holds no resources and includes the tokens sent so far."""

    request: Request
    attempt: HandoffAttempt
    event: FailedEvent


class IncomingHandoffs:
    """Incoming hand-offs. Engine thread only.

    Attributes:
        prealloc: attempts that wait for pages.
        transfer: granted attempts.
    Args:
        instance: of this node, by which producers identify its attempts.
        max_granted_pages: limit for attempts without a first token.
    """

    def __init__(
        self,
        *,
        instance: int,
        vocabulary_size: int,
        max_granted_pages: int,
        port: ConsumerCommands,
        scheduler: Scheduler,
        destinations: PageReservations,
        live: ActiveRequests,
        counts: DecodeCounters,
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
        self._on_its_way: dict[bytes, GrantedHandoff] = {}  # prompts whose pages others may share
        self._waits = QueueEstimator()  # queue for pages (prealloc), in pages
        self._deadlines_due = 0.0
        self._launch_by = 0.0  # one limit for all migrations arriving now
        self._log = ThrottledLog(log, Throttle(most=100))

    @property
    def backlog(self) -> QueueBacklog:
        """Backlog of attempts that wait for pages."""
        return self._waits.backlog

    def open(
        self,
        request: Request,
        owner: ProducerUp,
        candidates: tuple[str, ...],
        number: int,
        ticket: int = 0,
    ) -> None:
        """Open a hand-off at a producer.

        Args:
            number: of the attempt, unique for this request.
            ticket: under which the producer runs the request. 0: the producer does not run it.
        Raises:
            QueueFull: the request would get its pages too late.
        """
        now = time.monotonic()
        tables, num_tokens = self._destinations.tables, len(request.token_ids)
        room_tokens = num_tokens + _room_to_grow(request) if ticket else 0
        if room_tokens:
            num_pages = tables.room_pages(room_tokens, prefix=0)
        else:
            # At a page boundary, more pages may leave the window than the next token takes.
            num_pages = max(tables.pages_for(num_tokens), tables.pages_for(num_tokens + 1))
        priority, came = request.spec.priority, request.arrived
        self._waits.check(QueueEntry(request.start_by, num_pages, priority, came), now)
        handoff_id = HandoffId(self._instance, request.key, number)
        self._current[request.key] = handoff_id
        stamps = HandoffTimings(owner.address, owner.path, opened=now)
        self._live.stamps(request).open(stamps)
        prompt = b"" if room_tokens else _name_of(request)
        attempt = HandoffAttempt(
            handoff_id,
            request,
            owner.owner,
            candidates,
            num_pages,
            now,
            stamps,
            prompt,
            room_tokens,
        )
        if attempt.moves:
            attempt.until = now + MOVE_WAIT_S
        self.prealloc.put(attempt)
        self._waits.join(request.key, QueueEntry(-math.inf, num_pages, priority, came), now)
        self._counts.opened(number)
        self._port.post(
            OpenCommand(
                handoff_id,
                owner.owner,
                request.weights,
                Remaining(
                    max(request.deadline - now, _LEAST_BUDGET_S), max(request.start_by - now, 0.0)
                ),
                self._source(attempt, owner, ticket),
            )
        )

    def _source(self, attempt: HandoffAttempt, owner: ProducerUp, ticket: int) -> Source:
        request = attempt.request
        spec = replace(
            request.spec,
            token_ids=attempt.token_ids.tobytes(),
            num_generated=len(attempt.token_ids) - request.num_prompt,
            engine_crashes=request.engine_deaths,
            images=() if ticket else request.spec.images,
            prediction=b"",
            traceparent=self._live.stamps(request).trace.passed_on,
        )
        if ticket:
            return Live(spec, ticket)
        hints = (hint for hint in self._live.prefix_at(request) if hint.address != owner.address)
        return Prompt(spec, tuple(hints))

    # Pages --------------------------------------------------------------------------------------

    def grant(self, now: float) -> None:
        """Reserve pages for each waiting attempt that fits, and grant them."""
        floor, kept = self._scheduler.min_priority, self._scheduler.kept
        if floor < math.inf:
            while (attempt := self._next_fitting(now, floor)) is not None:
                if not self._grant(attempt):
                    self.prealloc.put(attempt)
                    break
            num_unready = self.transfer.num_unready(self._max_granted_pages)
            kept.barrier = self.prealloc.barrier(now, num_unready, floor)
        self._waits.tick(now)
        self._keep_room()
        kept.most_urgent = self._make_room()

    def _next_fitting(self, now: float, floor: float) -> HandoffAttempt | None:
        if not len(self.prealloc):
            return None
        self._keep_room()
        room, claim = self._scheduler.free_capacity(), self._scheduler.claim
        num_unready = self.transfer.num_unready(self._max_granted_pages)
        return self.prealloc.take_fitting(
            now, room, num_unready, claim, floor, lambda attempt: self._has_twin(attempt, now)
        )

    def _has_twin(self, attempt: HandoffAttempt, now: float) -> bool:
        """Return whether another request will soon bring the pages of the same prompt."""
        twin = self._on_its_way.get(attempt.prompt)
        if twin is None:
            return False
        computed = twin.attempt.stamps.first_token
        return not computed or now - computed < READ_SOON_S

    def _make_room(self) -> float:
        """Preempt requests for the most urgent attempt without pages.

        Returns its priority, or -inf if there is no such attempt.
        """
        if not (self._scheduler.preempts and len(self.prealloc)):
            return -math.inf
        num_unready = self.transfer.num_unready(self._max_granted_pages)
        attempt = self.prealloc.most_urgent(num_unready)
        if attempt is None:
            return -math.inf
        self._scheduler.preempt_for(attempt.request.spec.priority, attempt.num_pages)
        return attempt.request.spec.priority

    def _grant(self, attempt: HandoffAttempt) -> bool:
        destination = self._destinations.reserve(
            attempt.id, attempt.token_ids, attempt.request.namespace, attempt.room_tokens
        )
        if destination is None:
            return False
        attempt.stamps.granted = time.monotonic()
        if attempt.moves:
            attempt.until = attempt.stamps.granted + MOVE_WAIT_S
        self._waits.serve(attempt.request.key)
        growth_pages = self._scheduler.growth_pages(attempt.request)
        transfer = GrantedHandoff(attempt, destination, growth_pages)
        self.transfer.append(transfer)
        if attempt.prompt and self._destinations.lacks_pages(attempt.token_ids, destination):
            self._on_its_way[attempt.prompt] = transfer
        self._port.post(
            GrantCommand(
                attempt.id, destination.prefix_tokens, destination.fresh, attempt.room_tokens
            )
        )
        return True

    def _keep_room(self) -> None:
        """Keep slots and pages free for granted attempts that will join."""
        self._scheduler.kept.slots = len(self.transfer)
        self._scheduler.kept.pages = self.transfer.growth_pages()

    # Events of producers and reads ----------------------------------------------------------------

    def admitted(self, event: QueuedEvent) -> None:
        """Report the cached tokens before any is computed.

        If this node or the producer fails later, the next attempt finds the KV of this one in a
        cache.
        """
        transfer = self.transfer.get(event.id)
        if transfer is None:
            return
        request = transfer.attempt.request
        transfer.owner_cached_tokens = len(request.token_ids) - event.compute_tokens
        if not transfer.attempt.moves:
            request.cached_tokens = transfer.cached_tokens
            self._live.report_cached_tokens(request)

    def first_token(self, event: FirstTokenEvent) -> FailedHandoff | None:
        """Send the first token to the client at once, before its KV has landed.

        Returns the failed attempt if the token is invalid.
        """
        transfer = self.transfer.get(event.id)
        if transfer is None:
            return None
        if transfer.attempt.moves:
            return self._tokens_of_mover(transfer, event)
        request, stamps = transfer.attempt.request, transfer.attempt.stamps
        reason = ""
        if event.token >= self._vocabulary_size:
            reason = f"its first token is {event.token}, outside the vocabulary"
        elif not _as_asked(request, event):
            reason = "its first token came without the log-probabilities that were asked for"
        if reason:
            return self._refuse_ready(event, reason)
        stamps.first_ready, stamps.times = event.first_ready, event.times
        stamps.first_token = time.monotonic()
        self._live.stamps(request).note_first_token(stamps.first_token)
        transfer.first_token = event.token
        request.cached_tokens = transfer.cached_tokens
        self._live.send_first_token(request, event.token, event.logprobs, event.prompt_logprobs)
        finish = self._scheduler.finish_of(request, event.token)
        if finish is not None:
            self.give_up(request, "its first token ended the request")
            self._live.end(request, finish)
        return None

    def _refuse_ready(self, event: FirstTokenEvent, reason: str) -> FailedHandoff | None:
        return self._take_back(event.id, reason)

    def _take_back(self, handoff_id: HandoffId, reason: str) -> FailedHandoff | None:
        self._port.post(CancelCommand(handoff_id, reason))
        return self.lost(FailedEvent(handoff_id, reason, retryable=True))

    def _tokens_of_mover(
        self, transfer: GrantedHandoff, event: FirstTokenEvent
    ) -> FailedHandoff | None:
        """Check and record the tokens that the source generated and the client may not know.

        They are sent only once the hand-off is completed: until then the request runs at its
        source.
        """
        attempt = transfer.attempt
        fresh = (*event.token_ids, event.token)
        reason = ""
        if max(fresh) >= self._vocabulary_size:
            reason = f"one of its tokens is {max(fresh)}, outside the vocabulary"
        elif fresh[0] != attempt.request.token_ids[-1]:
            reason = "its tokens are not those that its client has"
        elif not _as_told(attempt.request, event):
            reason = "its tokens came without the log-probabilities that were asked for"
        else:
            tokens = np.append(attempt.token_ids, np.array(fresh[:-1], np.int32))
            before = dataclasses.replace(attempt.request, token_ids=tokens)
            if self._scheduler.finish_of(before, event.token) is not None:
                reason = "its last token ends it"
        if reason:
            return self._refuse_ready(event, reason)
        now = time.monotonic()
        attempt.stamps.first_ready, attempt.stamps.first_token = event.first_ready, now
        attempt.until = math.inf  # reads have their own deadlines
        self._note_arrival(now)
        num_tokens = len(attempt.token_ids) + len(event.token_ids)
        transfer.destination = self._destinations.settle(transfer.destination, num_tokens)
        transfer.told, transfer.first_token = event, event.token
        return None

    def held(self, event: CompletedEvent) -> None:
        transfer = self.transfer.get(event.id)
        if transfer is None:
            return
        transfer.held = True
        attempt, destination = transfer.attempt, transfer.destination
        stamps, now, num_read = attempt.stamps, time.monotonic(), len(destination.fresh)
        attempt.request.given_by.append(attempt.owner)
        if attempt.moves:
            self._note_arrival(now)
            self._counts.moved_here()
        else:
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

    def launch_waits_s(self, now: float, *, ahead: bool) -> float:
        """Return the longest delay, in seconds, of the next launch for paused migrations.

        A request that arrives just after a launch pauses for the whole step.

        Args:
            ahead: a step is running and the next one would be queued behind it. A request that
                arrives before its end would miss both.
        """
        if ahead:
            return math.inf if self.transfer.num_coming else 0.0
        return max(0.0, self._launch_by - now) if self.transfer.is_arriving else 0.0

    def _note_arrival(self, now: float) -> None:
        """Extend the launch delay when a migrating request has stopped or its pages are read."""
        if now > self._launch_by:
            self._launch_by = now + LAUNCH_WAITS_S

    def join(self) -> None:
        """Add requests whose KV and first token are here to the running batch.

        No forward is needed.
        """
        for transfer in self.transfer.held():
            request = transfer.continued()
            if not self._scheduler.join(request, transfer.destination.holding):
                return
            self._live.goes_on(request)
            self._remove(transfer.attempt.id)
            del self._current[request.key]
            transfer.attempt.stamps.joined = now = time.monotonic()
            if transfer.told is not None:
                self._live.stamps(request).note_first_token(now)
                fresh = (*transfer.told.token_ids, transfer.told.token)[1:]
                self._live.send_tokens(request, fresh, transfer.told.logprobs)

    # Failed and cancelled attempts ----------------------------------------------------------------

    def lost(self, event: FailedEvent) -> FailedHandoff | None:
        """Remove a failed attempt. Returns None if it was cancelled before."""
        transfer = self._remove(event.id)
        attempt = transfer.attempt if transfer else self.prealloc.remove(event.id)
        if attempt is None:
            return None
        self._counts.lost()
        request = transfer.continued() if transfer else attempt.request
        attempt.stamps.lost, attempt.stamps.reason = time.monotonic(), event.reason
        self._log.info(
            "hand-off failed",
            request_id=request.spec.request_id,
            **self._live.stamps(request).trace.log_fields,
            producer=attempt.stamps.prefill,
            reason=event.reason,
        )
        if transfer is not None:
            self._destinations.drop(transfer.destination)
        self._waits.leave(request.key)
        del self._current[request.key]
        self._live.goes_on(request)
        return FailedHandoff(request, attempt, event)

    def cancel_all(self, reason: str) -> list[FailedHandoff]:
        """Fail all attempts in progress, as if their producers had failed them."""
        under_way = [*self.prealloc, *(each.attempt for each in self.transfer)]
        lost = [self._take_back(attempt.id, reason) for attempt in under_way]
        return [each for each in lost if each is not None]

    def give_up(self, request: Request, reason: str) -> bool:
        """Cancel the attempt in progress and notify the producer. Returns False if there is none.

        Its pages are dropped, except for running reads.
        """
        handoff_id = self._current.pop(request.key, None)
        if handoff_id is None:
            return False
        self._live.stamps(request).attempts[-1].reason = reason
        self.prealloc.remove(handoff_id)
        self._waits.leave(request.key)
        transfer = self._remove(handoff_id)
        if transfer is not None:
            self._destinations.drop(transfer.destination)
        self._port.post(CancelCommand(handoff_id, reason))
        return True

    def _remove(self, handoff_id: HandoffId) -> GrantedHandoff | None:
        """Remove from the transfer queue.

        Requests with the same prompt no longer wait for its pages.
        """
        transfer = self.transfer.remove(handoff_id)
        if transfer is not None and self._on_its_way.get(transfer.attempt.prompt) is transfer:
            del self._on_its_way[transfer.attempt.prompt]
        return transfer

    def expire(self, now: float) -> None:
        """End attempts that are past their budget or can no longer start in time.

        Checks only every DEADLINE_CHECK_S.
        """
        if now < self._deadlines_due:
            return
        self._deadlines_due = now + DEADLINE_CHECK_S
        under_way = (*self.prealloc, *(each.attempt for each in self.transfer))
        for attempt in under_way:
            if attempt.request.deadline < now:
                self._end(attempt.request, out_of_time())
            elif attempt.until < now:
                self.give_up(attempt.request, "it took too long")
                self._live.refuse(attempt.request, NodeUnavailable("not migrated: timed out"))
        for attempt in self.prealloc:
            if attempt.request.start_by < now:
                finish = waited_too_long(self._waits.queued_s)
                self._counts.dropped(finish)
                self._end(attempt.request, finish)

    def _end(self, request: Request, finish: RequestEnd) -> None:
        self.give_up(request, finish.error)
        self._live.end(request, finish)


def _name_of(request: Request) -> bytes:
    """Hash of the namespace and the tokens."""
    return hashlib.blake2b(request.namespace + request.token_ids.tobytes(), digest_size=16).digest()


def _room_to_grow(request: Request) -> int:
    """Return how many tokens the request may generate while it waits for the migration."""
    return min(request.sampling.max_tokens - request.num_generated, MOST_GROWTH)


def _as_told(request: Request, event: FirstTokenEvent) -> bool:
    """Return whether the source sent the requested log-probabilities with its new tokens."""
    wanted = len(event.token_ids) if request.sampling.logprobs >= 0 else 0
    return len(event.logprobs or ()) == wanted


def _as_asked(request: Request, event: FirstTokenEvent) -> bool:
    """Return whether the event has as many log-probabilities as the request asks for."""
    told = [0 if each is None else len(each) for each in (event.logprobs, event.prompt_logprobs)]
    wanted = [
        int(request.sampling.logprobs >= 0),
        request.num_prompt - 1 if request.sampling.prompt_logprobs >= 0 else 0,
    ]
    return told == wanted
