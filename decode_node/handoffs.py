"""Incoming hand-offs of a decode node: open at a producer, grant pages, read KV, join the batch.

    open -> prealloc queue --grant--> transfer queue --held--> running batch
              `---------lost-----------'  `--first token ended it--> ended

If several requests have the same prompt (n > 1), one goes first. The others then share its whole
pages, and only the rest of the prompt, at most one page, is computed and transferred for each.

A migration from another decode node uses the same queues. Until its hand-off completes, the request
runs at its source, and this node sends the client nothing. A failed attempt ends the migration
here.

A request has at most one attempt at a time. placement.py chooses the producer, and decides what
follows a failed attempt.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from common.logs import ThrottledLog
from common.queueing import QueueEntry
from common.request import Remaining
from decode_node.active_requests import ActiveRequests
from decode_node.queues import PreallocQueue, TransferQueue
from decode_node.state import DecodeState, HandoffAttempt, PageReservations
from engine.batch.request import Ints, Request
from kvtransfer.messages import (
    CancelHandoff,
    HandoffAdmitted,
    HandoffId,
    Live,
    Prompt,
    SampledOutput,
    Source,
)
from kvtransfer.ports import (
    CompletedEvent,
    ConsumerCommands,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    OpenCommand,
    ProducerUp,
    ReadsEndedEvent,
)
from node.queues import SchedulerQueue
from node.request_state import Claim, RequestStage
from node.timings import HandoffTimings

log = logging.getLogger(__name__)

# Expected time in which a computed prompt is read. Then other requests stop waiting for its pages.
READ_SOON_S = 2.0
# Longest wait of a migration to this node for pages, and for the source to stop the request. The
# client is not affected: the request runs during both waits, or pauses for one step.
MOVE_WAIT_S = 2.0
MOST_GROWTH = 512  # tokens that may be generated during these waits
# Longest delay of a launch to include further migrations, once one of several is about to arrive.
LAUNCH_WAITS_S = 0.008
# The protocol needs a positive budget, which may have expired since the check.
_LEAST_BUDGET_S = 1e-3


class FailedHandoff(NamedTuple):
    """A failed attempt. Its request holds no resources, and includes the tokens sent so far."""

    state: DecodeState
    attempt: HandoffAttempt
    event: FailedEvent


class IncomingHandoffs:
    """The hand-offs that this node receives. Engine thread only.

    Args:
        instance: instance id of this node, by which producers identify its attempts.
        max_granted_pages: limit for attempts without a first token.
    Attributes:
        prealloc: requests whose attempts wait for pages.
        transfer: requests with granted attempts.
    """

    def __init__(
        self,
        port: ConsumerCommands,
        *,
        scheduled: SchedulerQueue[DecodeState],
        reservations: PageReservations,
        active: ActiveRequests,
        instance: int,
        vocabulary_size: int,
        max_granted_pages: int,
    ) -> None:
        self._port = port
        self._scheduled = scheduled
        self._scheduler = scheduled.scheduler
        self._reservations = reservations
        self._active = active
        self._instance = instance
        self._vocabulary_size = vocabulary_size
        self._max_granted_pages = max_granted_pages
        self.prealloc = PreallocQueue(self._cancel)
        self.transfer = TransferQueue(self._cancel, self._scheduler.kept)
        self._by_id: dict[HandoffId, DecodeState] = {}  # in either queue
        # Prompts whose pages other requests wait to share.
        self._on_its_way: dict[bytes, DecodeState] = {}
        self._launch_by = 0.0  # one limit for all migrations that arrive now
        self._log = ThrottledLog(log, most=100)

    def open(self, state: DecodeState, producer: ProducerUp, ticket: int = 0) -> None:
        """Open a hand-off at a producer.

        Args:
            ticket: ticket of the request that the producer runs. 0: the producer does not run it.
        Raises:
            QueueFull: the request would get its pages too late.
        """
        now, request = time.monotonic(), state.request
        tables, num_tokens = self._reservations.tables, len(request.token_ids)
        room_tokens = num_tokens + _room_to_grow(request) if ticket else 0
        if room_tokens:
            num_pages = tables.room_pages(room_tokens, prefix=0)
        else:
            # At a page boundary, more pages may leave the window than the next token needs.
            num_pages = max(tables.pages_for(num_tokens), tables.pages_for(num_tokens + 1))
        priority, came = request.spec.priority, request.arrived
        waits = self.prealloc.backlog
        waits.check(QueueEntry(request.start_by, num_pages, priority, came), now)
        timings = HandoffTimings(producer.address, producer.path, opened=now)
        state.timings.open(timings)
        attempt = HandoffAttempt(
            HandoffId(self._instance, state.key, state.next_attempt),
            producer.instance,
            request.token_ids[:-1] if room_tokens else request.token_ids,
            num_pages,
            now,
            timings,
            prompt=b"" if room_tokens else request.namespace + request.token_ids.tobytes(),
            room_tokens=room_tokens,
            until=now + MOVE_WAIT_S if room_tokens else math.inf,
        )
        self._by_id[attempt.id] = state
        state.handoff = attempt
        self.prealloc.put(state)
        waits.join(state.key, QueueEntry(-math.inf, num_pages, priority, came), now)
        self._active.counters.count("handoffs_opened")
        self._active.counters.count("handoff_retries", attempt.id.attempt > 1)
        budget_s = max(request.deadline - now, _LEAST_BUDGET_S)
        self._port.post(
            OpenCommand(
                attempt.id,
                producer.instance,
                request.weights,
                Remaining(budget_s, max(request.start_by - now, 0.0)),
                _source(state, attempt, producer, ticket),
            )
        )

    def grant(self, now: float) -> None:
        """Reserve and grant pages to each waiting attempt that fits."""
        scheduler, kept = self._scheduler, self._scheduler.kept
        floor = scheduler.min_priority if self.prealloc else math.inf
        if floor < math.inf:
            while (state := self._next_fitting(now, floor)) is not None:
                if not self._grant(state):
                    self.prealloc.put(state)
                    break
            self.prealloc.backlog.tick(now)
        if not self.prealloc:
            kept.barrier, kept.most_urgent = math.inf, -math.inf
            return
        if floor < math.inf:
            kept.barrier = self.prealloc.barrier(now, self._num_unready, floor)
        kept.most_urgent = self._preempt() if scheduler.preempts else -math.inf

    @property
    def _num_unready(self) -> float:
        return self.transfer.num_unready(self._max_granted_pages)

    def _next_fitting(self, now: float, floor: float) -> DecodeState | None:
        if not self.prealloc:
            return None
        room, demand = self._scheduler.free_capacity(), self._scheduler.first_demand
        return self.prealloc.take_fitting(
            now,
            room,
            self._num_unready,
            demand,
            floor,
            lambda state: self._prompt_is_coming(state, now),
        )

    def _prompt_is_coming(self, state: DecodeState, now: float) -> bool:
        """Return whether another request will soon bring the pages of the same prompt."""
        other = self._on_its_way.get(state.attempt.prompt)
        if other is None:
            return False
        computed = other.attempt.stamps.first_token
        return not computed or now - computed < READ_SOON_S

    def _preempt(self) -> float:
        """Preempt requests for the most urgent attempt without pages. Returns its priority or
        -inf.
        """
        state = self.prealloc.most_urgent(self._num_unready)
        if state is None:
            return -math.inf
        self._scheduler.preempt_for(state.priority, state.attempt.num_pages)
        return state.priority

    def _grant(self, state: DecodeState) -> bool:
        attempt = state.attempt
        destination = self._reservations.reserve(
            attempt.id, attempt.token_ids, state.request.namespace, attempt.room_tokens
        )
        if destination is None:
            return False
        attempt.destination = destination
        state.claims.add(Claim.RESERVATION, lambda: self._reservations.drop(attempt.reserved))
        attempt.stamps.granted = time.monotonic()
        if attempt.migrates:
            attempt.until = attempt.stamps.granted + MOVE_WAIT_S
        self.prealloc.backlog.serve(state.key)
        attempt.growth_pages = self._scheduler.growth_pages(state.request)
        self.transfer.put(state)
        if attempt.prompt and self._reservations.lacks_pages(attempt.token_ids, destination):
            self._on_its_way[attempt.prompt] = state
        self._port.post(
            GrantCommand(
                attempt.id, destination.prefix_tokens, destination.fresh, attempt.room_tokens
            )
        )
        return True

    def _granted(self, handoff_id: HandoffId) -> DecodeState | None:
        """Return the request with this attempt, if it is granted and has not failed."""
        state = self._by_id.get(handoff_id)
        return state if state is not None and state.stage is RequestStage.TRANSFER else None

    def admitted(self, event: HandoffAdmitted) -> None:
        """Report the cached tokens before any token is computed. If a node fails later, the next
        attempt would find the KV of this one in a cache.
        """
        state = self._granted(event.id)
        if state is None:
            return
        attempt = state.attempt
        attempt.producer_cached_tokens = len(state.request.token_ids) - event.compute_tokens
        if not attempt.migrates:
            state.request.cached_tokens = attempt.cached_tokens
            self._active.report_cached_tokens(state)

    def first_token(self, event: FirstTokenEvent) -> FailedHandoff | None:
        """Send the first token to the client at once, before its KV has landed. Returns the failed
        attempt if the token is invalid.
        """
        state = self._granted(event.id)
        if state is None:
            return None
        if state.attempt.migrates:
            return self._tokens_of_migration(state, event)
        request, attempt, output = state.request, state.attempt, event.output
        reason = ""
        if output.token >= self._vocabulary_size:
            reason = f"its first token is {output.token}, outside the vocabulary"
        elif not _as_asked(request, output):
            reason = "its first token came without the requested log-probabilities"
        if reason:
            return self._fail(event.id, reason)
        stamps = attempt.stamps
        stamps.first_ready, stamps.times = event.first_ready, output.times
        stamps.first_token = time.monotonic()
        state.timings.note_first_token(stamps.first_token)
        attempt.output = output
        request.cached_tokens = attempt.cached_tokens
        self._active.send_first_token(state, output)
        end = self._scheduler.finish_of(request, output.token)
        if end is not None:
            self.transfer.take(state)
            self._cancel(state, "its first token ends the response")
            state.close(end)
        return None

    def _tokens_of_migration(
        self, state: DecodeState, event: FirstTokenEvent
    ) -> FailedHandoff | None:
        """Check and record the tokens that the source generated and the client may not have. They
        are sent only when the hand-off completes, because until then the request runs at its
        source.
        """
        request, attempt, output = state.request, state.attempt, event.output
        fresh = (*output.token_ids, output.token)
        reason = ""
        if max(fresh) >= self._vocabulary_size:
            reason = f"one of its tokens is {max(fresh)}, outside the vocabulary"
        elif fresh[0] != request.token_ids[-1]:
            reason = "its tokens differ from those that the client has received"
        elif not _has_new_logprobs(request, output):
            reason = "its tokens came without the requested log-probabilities"
        else:
            tokens = np.append(attempt.token_ids, np.array(fresh[:-1], np.int32))
            before = dataclasses.replace(request, token_ids=tokens)
            if self._scheduler.finish_of(before, output.token) is not None:
                reason = "its last token ends the response"
        if reason:
            return self._fail(event.id, reason)
        now = time.monotonic()
        attempt.stamps.first_ready, attempt.stamps.first_token = event.first_ready, now
        attempt.until = math.inf  # reads have their own deadlines
        self._note_arrival(now)
        num_tokens = len(attempt.token_ids) + len(output.token_ids)
        attempt.destination = self._reservations.settle(attempt.reserved, num_tokens)
        attempt.output = output
        return None

    def completed(self, event: CompletedEvent) -> None:
        state = self._granted(event.id)
        if state is None:
            return
        attempt = state.attempt
        self.transfer.complete(state)
        destination = attempt.reserved
        stamps, now, num_read = attempt.stamps, time.monotonic(), len(destination.fresh)
        state.request.given_by.append(attempt.producer)
        if attempt.migrates:
            self._note_arrival(now)
            self._active.counters.count("moves/here")
        else:
            self._active.counters.held(
                now - attempt.opened,
                pages_read=num_read,
                tokens=len(state.request.token_ids),
                own=destination.prefix_tokens,
                producer_cached=attempt.producer_cached_tokens,
            )
        stamps.landed, stamps.held = event.landed, now
        stamps.num_pages = num_read
        stamps.num_bytes = num_read * self._reservations.page_bytes

    def reads_ended(self, event: ReadsEndedEvent) -> None:
        self._reservations.reads_ended(event.id)

    def reads(self) -> Collection[Ints]:
        """Pages held until no more bytes can land in them, one array per hand-off."""
        return self._reservations.reads.values()

    def launch_waits_s(self, now: float, *, ahead: bool) -> float:
        """Return how many seconds the next launch waits at most for paused migrations. A request
        that arrives just after a launch pauses for a whole step.

        Args:
            ahead: a step is running, and the next one would be queued behind it. A request that
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
        """Add requests whose KV and first token have arrived to the batch, without a forward
        pass.
        """
        for state in self.transfer.ready():
            attempt = state.attempt
            attempt.extend(state.request)
            if not self._scheduled.join(state, attempt.reserved.holding):
                return
            self.transfer.take(state)
            state.claims.hand_over(Claim.RESERVATION)
            self._end_attempt(state)
            attempt.stamps.joined = now = time.monotonic()
            if attempt.migrates and (output := attempt.output) is not None:
                state.timings.note_first_token(now)
                fresh = (*output.token_ids, output.token)[1:]
                self._active.send_tokens(state, fresh, output.logprobs)

    def failed(self, event: FailedEvent) -> FailedHandoff | None:
        """Remove a failed attempt. Returns None if it was cancelled before."""
        state = self._by_id.get(event.id)
        if state is None:
            return None
        attempt = state.attempt
        queue = self.transfer if state.stage is RequestStage.TRANSFER else self.prealloc
        queue.take(state)
        attempt.extend(state.request)
        self._end_attempt(state)
        self._active.counters.count("handoffs_failed")
        attempt.stamps.lost, attempt.stamps.reason = time.monotonic(), event.reason
        self._log.info(
            "hand-off failed",
            request_id=state.request.spec.request_id,
            **state.timings.trace.log_fields,
            producer=attempt.stamps.prefill,
            reason=event.reason,
        )
        return FailedHandoff(state, attempt, event)

    def cancel_all(self, reason: str) -> list[FailedHandoff]:
        """Fail all attempts in progress, as if their producers had failed them."""
        failed = [self._fail(handoff_id, reason) for handoff_id in tuple(self._by_id)]
        return [each for each in failed if each is not None]

    def _fail(self, handoff_id: HandoffId, reason: str) -> FailedHandoff | None:
        self._port.post(CancelHandoff(handoff_id, reason))
        return self.failed(FailedEvent(handoff_id, reason, retryable=True))

    def _cancel(self, state: DecodeState, reason: str) -> None:
        """End the attempt of a request that has left its queue, and notify the producer. Its pages
        are released when no read uses them.
        """
        attempt = state.attempt
        attempt.stamps.reason = reason
        self._end_attempt(state)
        self._port.post(CancelHandoff(attempt.id, reason))

    def _end_attempt(self, state: DecodeState) -> None:
        """Remove an ended attempt. Requests with the same prompt no longer wait for its pages."""
        attempt = state.attempt
        if self._on_its_way.get(attempt.prompt) is state:
            del self._on_its_way[attempt.prompt]
        self.prealloc.backlog.leave(state.key)
        state.claims.release(Claim.RESERVATION)
        del self._by_id[attempt.id]
        state.handoff = None


def _source(
    state: DecodeState, attempt: HandoffAttempt, producer: ProducerUp, ticket: int
) -> Source:
    request = state.request
    spec = replace(
        request.spec,
        token_ids=attempt.token_ids.tobytes(),
        num_generated=len(attempt.token_ids) - request.num_prompt,
        engine_crashes=request.engine_crashes,
        images=() if ticket else request.spec.images,
        input_embeddings=None if ticket else request.spec.input_embeddings,
        prediction=b"",
        traceparent=state.timings.trace.passed_on,
    )
    if ticket:
        return Live(spec, ticket)
    return Prompt(
        spec,
        tuple(hint for hint in state.prefix_hints if hint.address != producer.address),
        state.placement.encode_addresses,
    )


def _room_to_grow(request: Request) -> int:
    """Return how many tokens the request may generate while it waits for the migration."""
    return min(request.sampling.max_tokens - request.num_generated, MOST_GROWTH)


def _has_new_logprobs(request: Request, output: SampledOutput) -> bool:
    """Return whether the source sent the requested log-probabilities with its new tokens."""
    wanted = len(output.token_ids) if request.sampling.logprobs >= 0 else 0
    return len(output.logprobs or ()) == wanted


def _as_asked(request: Request, output: SampledOutput) -> bool:
    """Return whether the output has the log-probabilities, hidden states and routed experts that
    the request asks for.
    """
    asked = request.sampling.hidden_states, request.sampling.routed_experts
    rows = output.logprobs, output.prompt_logprobs
    returned = [(bool(each.hidden_states), bool(each.routed_experts)) for each in rows if each]
    if any(each != asked for each in returned):
        return False
    wanted = [int(request.sampling.logprobs >= 0), request.num_prompt_logprobs]
    return [len(each or ()) for each in rows] == wanted
