"""Placement of prefills: at a paired prefill node, at one that will soon be paired again, or here.

    new, or lost its hand-off --> hand-off at the first usable candidate
                             |--> held back (a pause) or unpaired (owners just lost) --> again
                             `--> here (colocated, short, no owner, all tried)
                                    |--> fetching: another node has much of it --> waiting queue
                                    `--> waiting queue
    migrates to this node --> fetching: its KV so far --> migration group --> hand-off of the rest

This module knows which producers are available and which have failed a request. The steps of a
hand-off are in handoffs.py.
"""

import math
import time
from collections.abc import Sequence

from grpc import StatusCode

from common.config import DecodeConfig
from common.errors import DeadlineExceeded, NodeUnavailable, QueueFull, ServingError
from common.queueing.drain import QueueEstimator
from common.queueing.waiting_line import QueueEntry
from common.requests.quarantine import GUILTY, MAX_DEATHS
from decode_node import canary
from decode_node.active_requests import ActiveRequests
from decode_node.counts import DecodeCounters
from decode_node.handoffs import MOVE_WAIT_S, FailedHandoff, IncomingHandoffs
from decode_node.held_back import PausedQueue
from decode_node.migration_groups import MigrationGroups
from decode_node.unpaired import UnpairedEntry, UnpairedQueue
from engine.batch.request import FinishReason, Request, RequestEnd, out_of_time
from engine.kv_cache.radix import PrefixCache
from engine.scheduler.scheduler import Scheduler
from kvtransfer.ports import ProducerDown, ProducerUp
from node.messages import MigrateFrom
from node.sharing.fetch_queue import FetchQueue
from node.sharing.prefixes import PrefixSharing


class PrefillPlacement:
    """Placement of requests. Engine thread only.

    Attributes:
        unpaired: requests that wait for a producer.
        held_back: requests that wait for the end of a pause.
        fetching: requests whose prefix is being fetched.
    Args:
        prompts: queue of prompts to be computed here.
    """

    def __init__(
        self,
        config: DecodeConfig,
        *,
        scheduler: Scheduler,
        cache: PrefixCache,
        handoffs: IncomingHandoffs,
        prompts: QueueEstimator,
        live: ActiveRequests,
        counts: DecodeCounters,
        sharing: PrefixSharing,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._cache = cache
        self._handoffs = handoffs
        self._prompts = prompts
        self._live = live
        self._counts = counts
        self._sharing = sharing
        self._owners: dict[str, ProducerUp] = {}  # by address, of usable links
        self.unpaired = UnpairedQueue(config.reconnect_wait_s)
        self.held_back = PausedQueue()
        self.fetching = FetchQueue(sharing.fetches)
        self._convoys = MigrationGroups()

    def owner_up(self, event: ProducerUp) -> None:
        self._owners[event.address] = event
        self._counts.link(up=True)

    def owner_down(self, event: ProducerDown, now: float) -> bool:
        """Remove a producer. Returns whether this node was paired with it."""
        owner = self._owners.get(event.address)
        if owner is None or owner.owner != event.owner:
            return False
        del self._owners[event.address]
        self.unpaired.owner_lost(event.address, now)
        self._counts.link(up=False)
        return True

    def place(self, request: Request, candidates: tuple[str, ...], attempt: int = 1) -> None:
        """Open a hand-off at the first usable candidate, wait for one, or prefill here.

        During a pause, the request is placed after the pause.

        Args:
            attempt: number of the next attempt.
        Raises:
            DeadlineExceeded: no time is left.
            QueueFull: it would be scheduled too late.
        """
        now = time.monotonic()
        if request.deadline <= now:
            raise DeadlineExceeded(out_of_time().error)
        if self._scheduler.paused:
            until = min(request.deadline, request.start_by)
            self.held_back.append(UnpairedEntry(request, candidates, attempt, until))
            return
        usable = self._usable(candidates)
        if not usable and self._waits_for_an_owner(request, candidates, attempt, now):
            return
        here = self._why_here(request, usable, attempt)
        if here:
            self._prefill_here(request, here, now)
        else:
            self._handoffs.open(request, usable[0], candidates, attempt)

    def place_mover(self, request: Request, source: MigrateFrom) -> None:
        """Start the migration of a request to this node.

        Copies its KV so far while it runs on, then opens a hand-off at its source. Waits first if
        this node is not paired with the source.

        Raises:
            QueueFull: it would get its pages too late.
            NodeUnavailable: this node is paused.
        """
        if source.address not in self._owners:
            until = time.monotonic() + MOVE_WAIT_S
            self.unpaired.append(UnpairedEntry(request, (source.address,), 1, until, source.ticket))
        elif self._copy_first(request, source):
            self._convoys.put(request, source)
            self.fetching.put(request)
        else:
            self._move(request, source)

    def retry(self, lost: FailedHandoff) -> None:
        """Place a request after a failed attempt: at another node, or here. Otherwise end it."""
        request, event = lost.request, lost.event
        if _is_canary(request):  # a canary tests one producer and has no other
            self._live.refuse(request, NodeUnavailable(event.reason))
            return
        if lost.attempt.moves:  # the source may still run it
            self._live.refuse(request, NodeUnavailable(f"not migrated: {event.reason}"))
            return
        if event.engine_died:
            if request.engine_deaths >= MAX_DEATHS:
                guilty = RequestEnd(FinishReason.ERROR, GUILTY, StatusCode.INTERNAL)
                self._live.end(request, guilty)
                return
            request.quarantine_after(request.engine_deaths + 1)
        candidates = lost.attempt.candidates if event.retryable else ()
        if not event.may_return:
            failed = lost.attempt.stamps.prefill
            candidates = tuple(each for each in candidates if each != failed)
        attempt = lost.attempt.id.attempt + 1
        try:
            if event.retry_after_s:
                self._check_another(lost, candidates, attempt)
            else:
                request.start_by = math.inf  # the delay was not its fault
            self.place(request, candidates, attempt)
        except ServingError as error:
            self._live.refuse(request, error)

    def place_unpaired(self, now: float) -> None:
        """Place requests that waited for a producer, successfully or until a timeout."""
        for waiter in self.unpaired.take(now, self._owners):
            try:
                if not waiter.ticket:
                    self.place(waiter.request, waiter.candidates, waiter.attempt)
                elif self._usable(waiter.candidates):
                    source = MigrateFrom(waiter.candidates[0], waiter.ticket)
                    self.place_mover(waiter.request, source)
                else:
                    raise NodeUnavailable("not migrated: this node is not paired with the other")
            except ServingError as error:
                self._live.refuse(waiter.request, error)

    def place_paused(self, now: float) -> None:
        """Place paused requests after the pause. During it, end those that have waited too long."""
        for waiter in self.held_back:
            request = waiter.request
            try:
                if not self._scheduler.paused:
                    self.held_back.remove(request)
                    self.place(request, waiter.candidates, waiter.attempt)
                elif waiter.until <= now:
                    self.held_back.remove(request)
                    raise _paused_too_long(request, now)
            except ServingError as error:
                self._live.refuse(request, error)

    def place_fetched(self, now: float) -> None:
        """Send requests to the scheduler whose fetch has ended, successfully or not.

        Migrations continue with their hand-off, alone or as a group.
        """
        for request, _ in self.fetching.take(now):
            if request in self._convoys:
                self._sharing.forget(request.key)
                self._convoys.copied(request)
                continue
            try:
                self._scheduler.add(request)
            except ServingError as error:
                self._prompts.leave(request.key)
                self._sharing.forget(request.key)
                self._live.refuse(request, error)
        for request, source in self._convoys.take():
            try:
                self._move(request, source)
            except ServingError as error:
                self._live.refuse(request, error)

    def give_up(self, request: Request) -> bool:
        """Remove a request that has ended. Returns False if it is not queued here."""
        if self.unpaired.remove(request) or self.held_back.remove(request):
            return True
        if not (self._convoys.remove(request) or self.fetching.remove(request)):
            return False
        self._prompts.leave(request.key)
        self._sharing.forget(request.key)
        return True

    @property
    def num_fetching(self) -> int:
        """Requests whose prefix is being fetched or is waiting for another fetch."""
        return len(self.fetching) + len(self._convoys)

    def _check_another(self, lost: FailedHandoff, candidates: Sequence[str], attempt: int) -> None:
        """Check that another producer may be tried after one whose queue is too long.

        Such a request is not prefilled here, because that would delay running responses.

        Raises:
            QueueFull: no other producer is left, or no time.
        """
        here = self._why_here(lost.request, self._usable(candidates), attempt)
        if here or lost.request.start_by <= time.monotonic():
            raise QueueFull(lost.event.reason, lost.event.retry_after_s)

    def _usable(self, candidates: Sequence[str]) -> list[ProducerUp]:
        return [self._owners[address] for address in candidates if address in self._owners]

    def _waits_for_an_owner(
        self, request: Request, candidates: tuple[str, ...], attempt: int, now: float
    ) -> bool:
        """Queue the request for a producer if one of the candidates may soon be paired again."""
        until = min(self.unpaired.worth_until(candidates), request.deadline)
        if self._is_exhausted(attempt) or now >= until or self._is_short(request):
            return False
        self.unpaired.append(UnpairedEntry(request, candidates, attempt, until))
        self._live.stamps(request).unpaired = now
        return True

    def _why_here(self, request: Request, usable: Sequence[ProducerUp], attempt: int) -> str:
        """Return why it is prefilled here, as named in DecodeCounters, or "" if it is not."""
        if _is_canary(request):
            return "canary"
        if self._config.mode == "colocated":
            return "colocated"
        if self._is_exhausted(attempt) or (attempt > 1 and not usable):
            return "exhausted"
        if not usable:
            return "no_prefill_node"
        return "short" if self._is_short(request) else ""

    def _is_exhausted(self, attempt: int) -> bool:
        return attempt > self._config.handoff_retries + 1

    def _is_short(self, request: Request) -> bool:
        longest = self._config.local_prefill_max_tokens
        if not longest:
            return False
        cached = self._cache.match(request.token_ids[:-1], request.namespace).num_tokens
        return len(request.token_ids) - cached <= longest

    def _prefill_here(self, request: Request, why: str, now: float) -> None:
        num_tokens = len(request.token_ids)
        self._prompts.check(QueueEntry(request.start_by, num_tokens, request.spec.priority), now)
        if self._fetch_first(request):
            self.fetching.put(request)
        else:
            self._scheduler.add(request)
        place = QueueEntry(request.due, num_tokens, request.spec.priority)
        self._prompts.join(request.key, place, now)
        if not _is_canary(request):  # canaries are not client prompts
            self._counts.local_prefill(why)
        stamps = self._live.stamps(request)
        stamps.queued, stamps.why_here = now, why

    def _move(self, request: Request, source: MigrateFrom) -> None:
        if self._scheduler.paused:
            raise NodeUnavailable("not migrated: this node is paused")
        owner = self._owners.get(source.address)
        if owner is None:
            raise NodeUnavailable("not migrated: this node is not paired with the other")
        self._handoffs.open(request, owner, (), 1, source.ticket)

    def _copy_first(self, request: Request, source: MigrateFrom) -> bool:
        if self._scheduler.paused:
            return False
        # The newest token may have no KV yet.
        tokens, room = request.token_ids[:-1], self._scheduler.free_capacity().num_pages
        return self._sharing.fetches.copy(
            request.key, tokens, request.namespace, source.address, source.ticket, room=room
        )

    def _fetch_first(self, request: Request) -> bool:
        hints = self._live.prefix_at(request)
        if not hints:
            return False
        room, queued_s = self._scheduler.free_capacity().num_pages, self._prompts.queued_s
        return self._sharing.fetch(request, hints, room=room, queued_s=queued_s)


def _is_canary(request: Request) -> bool:
    return request.origin[0] == canary.STREAM


def _paused_too_long(request: Request, now: float) -> ServingError:
    if request.deadline <= now:
        return DeadlineExceeded(f"{out_of_time().error}, while generation was paused")
    return QueueFull(
        "generation is paused, for longer than this request may wait", retry_after_s=1.0
    )
