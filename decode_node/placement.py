"""Placement of prefills: at a paired prefill node, at one that will soon be paired again, or here.

    new, or lost its hand-off --> hand-off at the first usable candidate
        |--> paused or unpaired (producers just lost) --> again
        `--> here (colocated, short, no producer, all tried)
               |--> fetching: another node has much of it --> waiting queue
               `--> waiting queue
    migrates to this node --> fetching: its KV so far --> migration group --> hand-off of the rest

This module knows which producers are available, and which have failed a request. handoffs.py
carries out the hand-offs.
"""

import math
import time
from collections.abc import Sequence

from grpc import StatusCode

from common.config import DecodeConfig
from common.errors import DeadlineExceeded, NodeUnavailable, QueueFull, ServingError
from common.queueing import QueueEntry
from common.request import CRASHED_TWICE, MAX_ENGINE_CRASHES
from decode_node import canary
from decode_node.active_requests import DecodeCounters
from decode_node.canary import Canary
from decode_node.handoffs import MOVE_WAIT_S, FailedHandoff, IncomingHandoffs
from decode_node.queues import DecodeQueues
from decode_node.state import DecodeState
from engine.batch.request import FinishReason, RequestEnd, out_of_time
from engine.kv_cache.radix import PrefixCache
from kvtransfer.ports import ProducerUp
from node.messages import MigrateFrom
from node.request_state import Claim
from node.sharing.prefixes import PrefixSharing


class PrefillPlacement:
    """Chooses where each request is prefilled. Engine thread only."""

    def __init__(
        self,
        config: DecodeConfig,
        *,
        queues: DecodeQueues,
        cache: PrefixCache,
        handoffs: IncomingHandoffs,
        sharing: PrefixSharing,
        canary: Canary,
        counters: DecodeCounters,
    ) -> None:
        self._config = config
        self._queues = queues
        self._scheduler = queues.scheduled.scheduler
        self._cache = cache
        self._handoffs = handoffs
        self._sharing = sharing
        self._canary = canary
        self._producers = sharing.shared.producers
        self._counters = counters

    def place_ready(self, now: float) -> None:
        """Place requests that are prepared, whose producer is paired again, whose pause has ended,
        or whose fetch has ended, successfully or not.
        """
        queues = self._queues
        for state, refusal in queues.preparing.ready(now):
            if refusal is None:
                self.place(state)
            else:
                state.close(refusal)
        if queues.unpaired:
            for state in queues.unpaired.ready(now):
                self.place(state)
        if queues.paused:
            for state in queues.paused.ready():
                self.place(state)
        if queues.fetching:
            for state in queues.fetching.ready():
                self._place_fetched(state)

    def place(self, state: DecodeState) -> None:
        """Open a hand-off at the first usable candidate, wait for one, or prefill here. On a paused
        node, the request is placed after the pause. A request that cannot be placed is rejected.
        """
        try:
            if state.placement.move_from is not None:
                self._place_migration(state, state.placement.move_from)
            elif _is_canary(state) and state.candidates:
                self._handoffs.open(state, self._canary.producer)
            else:
                self._place_prompt(state)
        except ServingError as error:
            state.close(error)

    def retry(self, failed: FailedHandoff) -> None:
        """Place a request after a failed attempt: at another node, or here. Otherwise end it."""
        state, event = failed.state, failed.event
        request = state.request
        if _is_canary(state):  # a canary tests one producer and has no other
            return state.close(NodeUnavailable(event.reason))
        if failed.attempt.migrates:  # the source may still run it
            return state.close(NodeUnavailable(f"not migrated: {event.reason}"))
        if event.engine_died:
            if request.engine_crashes >= MAX_ENGINE_CRASHES:
                end = RequestEnd(FinishReason.ERROR, CRASHED_TWICE, StatusCode.INTERNAL)
                return state.close(end)
            request.quarantine_after(request.engine_crashes + 1)
        candidates = state.candidates if event.retryable else ()
        if not event.may_return:
            address = failed.attempt.stamps.prefill
            candidates = tuple(each for each in candidates if each != address)
        state.candidates = candidates
        state.next_attempt = failed.attempt.id.attempt + 1
        if not event.retry_after_s:
            request.start_by = math.inf  # the request did not cause the delay
        elif not self._may_try_another(state):
            return state.close(QueueFull(event.reason, event.retry_after_s))
        self.place(state)

    def _place_prompt(self, state: DecodeState) -> None:
        """Place a request that does not run elsewhere.

        Raises:
            DeadlineExceeded: no time is left.
            QueueFull: it would be scheduled too late.
        """
        now = time.monotonic()
        if state.request.deadline <= now:
            raise DeadlineExceeded(out_of_time().error)
        if self._scheduler.paused:
            return self._queues.paused.put(state)
        usable = self._usable(state)
        if not usable and self._waits_for_a_producer(state, now):
            state.timings.unpaired = now
            return self._queues.unpaired.put(state)
        here = self._why_here(state, usable)
        if here:
            self._prefill_here(state, here, now)
        else:
            self._handoffs.open(state, usable[0])

    def _place_migration(self, state: DecodeState, source: MigrateFrom) -> None:
        """Migrate a request to this node. Copies its KV so far while it still runs at the source,
        then opens a hand-off there. First waits if this node is not paired with the source.

        Raises:
            QueueFull: it would get its pages too late.
            NodeUnavailable: this node is paused, or does not pair with the source in time.
        """
        if source.address not in self._producers:
            if state.until < math.inf:
                raise NodeUnavailable("not migrated: this node is not paired with the other")
            state.candidates = (source.address,)
            state.until = time.monotonic() + MOVE_WAIT_S
            self._queues.unpaired.put(state)
        elif self._copy_first(state, source):
            self._queues.fetching.put(state)
        else:
            self._migrate(state, source)

    def _place_fetched(self, state: DecodeState) -> None:
        """Schedule a prompt whose fetch has ended, or open the hand-off of a migration."""
        source = state.placement.move_from
        try:
            if source is None:
                self._queues.scheduled.put(state)
            else:
                self._migrate(state, source)
        except ServingError as error:
            state.close(error)

    def _may_try_another(self, state: DecodeState) -> bool:
        """Return whether another producer may be tried after one whose queue was too long. Such a
        request is not prefilled here, because that would delay running responses.
        """
        here = self._why_here(state, self._usable(state))
        return not here and state.request.start_by > time.monotonic()

    def _usable(self, state: DecodeState) -> list[ProducerUp]:
        producers = self._producers
        return [producers[address] for address in state.candidates if address in producers]

    def _waits_for_a_producer(self, state: DecodeState, now: float) -> bool:
        """Return whether a candidate may soon be paired again. Sets `state.until`."""
        until = self._queues.unpaired.worth_until(state.candidates)
        state.until = min(until, state.request.deadline)
        return not (self._is_exhausted(state) or now >= state.until or self._is_short(state))

    def _why_here(self, state: DecodeState, usable: Sequence[ProducerUp]) -> str:
        """Return the reason for a prefill here, as named in DecodeCounters, or ""."""
        if _is_canary(state):
            return "canary"
        if self._config.mode == "colocated":
            return "colocated"
        if self._is_exhausted(state) or (state.next_attempt > 1 and not usable):
            return "exhausted"
        if not usable:
            return "no_prefill_node"
        return "short" if self._is_short(state) else ""

    def _is_exhausted(self, state: DecodeState) -> bool:
        return state.next_attempt > self._config.handoff_retries + 1

    def _is_short(self, state: DecodeState) -> bool:
        longest = self._config.local_prefill_max_tokens
        if not longest:
            return False
        request = state.request
        cached = self._cache.match(request.token_ids[:-1], request.namespace).num_tokens
        return len(request.token_ids) - cached <= longest

    def _prefill_here(self, state: DecodeState, why: str, now: float) -> None:
        request, backlog = state.request, self._queues.scheduled.backlog
        num_tokens, priority = len(request.token_ids), request.spec.priority
        backlog.check(QueueEntry(request.start_by, num_tokens, priority), now)
        if self._fetch_first(state):
            self._queues.fetching.put(state)
        else:
            self._queues.scheduled.put(state)
        backlog.join(state.key, QueueEntry(request.due, num_tokens, priority), now)
        state.claims.add(Claim.BACKLOG, lambda: backlog.leave(state.key))
        if not _is_canary(state):  # canaries are not client prompts
            self._counters.count(f"local_prefills/{why}")
        state.timings.queued, state.timings.why_here = now, why

    def _migrate(self, state: DecodeState, source: MigrateFrom) -> None:
        """Open the hand-off of a migration at its source."""
        if self._scheduler.paused:
            raise NodeUnavailable("not migrated: this node is paused")
        producer = self._producers.get(source.address)
        if producer is None:
            raise NodeUnavailable("not migrated: this node is not paired with the other")
        self._handoffs.open(state, producer, source.ticket)

    def _copy_first(self, state: DecodeState, source: MigrateFrom) -> bool:
        if self._scheduler.paused:
            return False
        # The newest token may have no KV yet.
        request, room = state.request, self._scheduler.free_capacity().num_pages
        copies = self._sharing.fetches.copy(
            state.key,
            request.token_ids[:-1],
            request.namespace,
            source.address,
            source.ticket,
            room=room,
        )
        if copies:
            self._claim_fetch(state)
        return copies

    def _fetch_first(self, state: DecodeState) -> bool:
        if not state.prefix_hints:
            return False
        room, queued_s = (
            self._scheduler.free_capacity().num_pages,
            self._queues.scheduled.backlog.queued_s,
        )
        fetches = self._sharing.fetch(
            state.request, state.prefix_hints, room=room, queued_s=queued_s
        )
        if fetches:
            self._claim_fetch(state)
        return fetches

    def _claim_fetch(self, state: DecodeState) -> None:
        state.claims.add(Claim.FETCH, lambda: self._sharing.forget(state.key))


def _is_canary(state: DecodeState) -> bool:
    return state.origin[0] == canary.STREAM
