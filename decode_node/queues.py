"""The queues of the decode node, from preparation to the scheduler.

PreallocQueue holds attempts that are opened at a producer and wait for pages here. TransferQueue
holds granted attempts whose KV is being computed, read or confirmed. A request holds no resources
while it waits for pages, and all that it needs from the grant on. Prompts that are prefilled here
wait for the same pages in the scheduler, as if both were one queue (engine/scheduler/arrivals.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator

from common.errors import DeadlineExceeded, NodeUnavailable, QueueFull
from common.queueing import PriorityClass, QueueEstimator, class_of
from decode_node.state import DecodeState
from engine.batch.request import out_of_time, waited_too_long
from engine.scheduler.arrivals import (
    FairQueue,
    FreeCapacity,
    KeptCapacity,
    PageDemand,
    is_overdue,
)
from engine.scheduler.scheduler import Scheduler
from node.queues import KeyedQueue, PreparationStages, RequestQueues, SchedulerQueue
from node.request_state import Claim, Ending, RequestStage, as_request_end
from node.sharing.fetches import PrefixFetches

_TIMED_OUT = "timed out"


class PausedQueue(KeyedQueue[DecodeState]):
    """Requests to place after the pause of this node. They hold no resources."""

    stage = RequestStage.PAUSED

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def ready(self) -> Iterator[DecodeState]:
        """Remove and yield the requests in order of arrival, once the pause has ended."""
        if not self._scheduler.paused:
            for state in self:
                self.take(state)
                yield state

    def expired(self, now: float) -> Iterable[tuple[DecodeState, Ending]]:
        if not self._scheduler.paused:
            return
        for state in self:
            deadline, start_by = state.request.deadline, state.request.start_by
            if min(deadline, start_by) > now:
                continue
            self.take(state)
            if deadline <= now:
                sentence = f"{out_of_time().error}, while generation was paused"
                yield state, DeadlineExceeded(sentence)
            else:
                sentence = "generation has been paused for longer than this request may wait"
                yield state, QueueFull(sentence, retry_after_s=1.0)


class UnpairedQueue(KeyedQueue[DecodeState]):
    """Requests whose prefill nodes have just been lost. They hold no resources.

    A decode node that stalls for some seconds loses all pairs and hand-offs, although the prefill
    nodes are healthy and have cached most of the KV. It pairs with them again within a second or
    two. These requests wait for that, for a limited time.

    Args:
        producers: addresses of paired producers.
        wait_s: longest wait in seconds, from the last loss of a candidate.
    """

    stage = RequestStage.UNPAIRED

    def __init__(self, producers: Container[str], wait_s: float) -> None:
        super().__init__()
        self._producers = producers
        self._wait_s = wait_s
        self._lost_at: dict[str, float] = {}  # by address

    def lost(self, address: str, now: float) -> None:
        """Record that the producer at this address is lost."""
        recent = ((each, at) for each, at in self._lost_at.items() if now - at < self._wait_s)
        self._lost_at = {**dict(recent), address: now}

    def worth_until(self, candidates: Collection[str]) -> float:
        """Return until when it is worth waiting for one of the candidates."""
        lost_at = (self._lost_at.get(address, -math.inf) for address in candidates)
        return max(lost_at, default=-math.inf) + self._wait_s

    def ready(self, now: float) -> Iterator[DecodeState]:
        """Remove and yield requests with a paired candidate or an expired wait."""
        for state in self:
            if state.until <= now or any(each in self._producers for each in state.candidates):
                self.take(state)
                yield state


class PrefixFetchQueue(KeyedQueue[DecodeState]):
    """Requests whose prefix is being fetched. The fetch holds pages, the requests hold none.

    Migrations that are copied from one node at the same time continue as a group: all stop after
    the same step there, and start with the same step here. One by one, each would arrive during a
    step that was started for the one before, and would pause until that step ends.
    """

    stage = RequestStage.FETCHING

    def __init__(self, fetches: PrefixFetches) -> None:
        super().__init__()
        self._fetches = fetches
        # key of a copied migration -> keys of migrations whose copies were in progress when its own
        # copy ended.
        self._awaited: dict[int, set[int]] = {}

    def take(self, state: DecodeState) -> None:
        super().take(state)
        self._awaited.pop(state.key, None)
        self._await_no_more(state.key)

    def ready(self) -> Iterator[DecodeState]:
        """Remove and yield requests whose fetch has ended, successfully or not, and migrations
        whose whole group is copied.
        """
        for key in self._fetches.take_over() if self._states else ():
            state = self._states.get(key)
            if state is None:
                continue
            if state.placement.move_from is None:
                self.take(state)
                yield state
            else:
                state.claims.release(Claim.FETCH)
                self._copied(state)
        for key, awaited in tuple(self._awaited.items()):
            if not awaited:
                state = self._states[key]
                self.take(state)
                yield state

    def _copied(self, state: DecodeState) -> None:
        source = _source(state)
        group = {each.key for each in self._states.values() if _source(each) == source}
        self._awaited[state.key] = group - self._awaited.keys() - {state.key}
        self._await_no_more(state.key)

    def _await_no_more(self, key: int) -> None:
        for awaited in self._awaited.values():
            awaited.discard(key)


def _source(state: DecodeState) -> str | None:
    """Return the address of the node that the request migrates from, if any."""
    source = state.placement.move_from
    return source.address if source is not None else None


class AttemptQueue(KeyedQueue[DecodeState]):
    """Requests with a hand-off in progress. It is cancelled if the request ends.

    Args:
        cancel: cancels the attempt of a request that has left the queue, with a reason.
    """

    def __init__(self, cancel: Callable[[DecodeState, str], None]) -> None:
        super().__init__()
        self._cancel = cancel

    def remove(self, state: DecodeState, ending: Ending) -> bool:
        self.take(state)
        self._cancel(state, as_request_end(ending).error)
        return True

    def expired(self, now: float) -> Iterator[tuple[DecodeState, Ending]]:
        for state in self:
            late = self._late(state, now)
            if late is not None:
                reason, ending = late
                self.take(state)
                self._cancel(state, reason)
                yield state, ending

    def _late(self, state: DecodeState, now: float) -> tuple[str, Ending] | None:
        """Return the reason and the end of an attempt past a deadline, or None."""
        if state.request.deadline < now:
            return out_of_time().error, out_of_time()
        if state.attempt.until < now:
            return _TIMED_OUT, NodeUnavailable(f"not migrated: {_TIMED_OUT}")
        return None


class PreallocQueue(AttemptQueue):
    """Requests whose attempt waits for pages. Pages are granted in order of queue position, with
    clients taking turns. Small attempts may overtake a large one for a limited time.

    Attributes:
        backlog: the queue for pages, in pages.
    """

    stage = RequestStage.PREALLOC

    def __init__(self, cancel: Callable[[DecodeState, str], None]) -> None:
        super().__init__(cancel)
        self.backlog = QueueEstimator()
        self._turns: FairQueue[int, DecodeState] = FairQueue()

    def put(self, state: DecodeState) -> None:
        super().put(state)
        self._turns.put(state.key, state)

    def take(self, state: DecodeState) -> None:
        super().take(state)
        self._turns.take(state.key)

    def _late(self, state: DecodeState, now: float) -> tuple[str, Ending] | None:
        late = super()._late(state, now)
        if late is None and state.request.start_by < now:
            end = waited_too_long(self.backlog.queued_s)
            return end.error, end
        return late

    def take_fitting(
        self,
        now: float,
        room: FreeCapacity,
        num_unready: float,
        demand: PageDemand | None,
        floor: float = -math.inf,
        held_back: Callable[[DecodeState], bool] = lambda state: False,
    ) -> DecodeState | None:
        """Remove and return the first request whose attempt may be granted. Large attempts neither
        block the queue nor starve.

        Args:
            num_unready: pages that may be granted to attempts without a first token.
            demand: pages for which a prompt to be prefilled here waits. If they are free now, later
                attempts share the rest.
            floor: lowest priority that may be granted.
            held_back: returns whether an attempt that fits must wait, for pages that another
                attempt will leave in the cache.
        """
        if demand is not None and demand.priority < floor:
            demand = None
        for state in self._turns.in_turn():
            if state.priority < floor:
                continue
            num_pages = state.attempt.num_pages
            if demand is not None and demand.queue_position < state.queue_position:
                if room.fits(demand.num_pages):
                    room = room.without(demand.num_pages)
                elif is_overdue(demand.arrived, now):
                    return None
                demand = None
            if room.fits(num_pages) and num_pages <= num_unready:
                if held_back(state):
                    continue
                self._turns.serve(state.key)
                super().take(state)
                return state
            if is_overdue(state.arrived, now):
                return None
        return None

    def barrier(self, now: float, num_unready: float, floor: float = -math.inf) -> float:
        """Return the queue position of the first attempt that no later prompt may overtake any
        more, or infinity. Attempts that wait for other grants or for requests of higher priority do
        not count, because they do not compete with prompts for pages.
        """
        for state in self._turns.in_turn():
            if state.priority < floor:
                continue
            if not is_overdue(state.arrived, now):
                break
            if state.attempt.num_pages <= num_unready:
                return state.queue_position
        return math.inf

    def most_urgent(self, num_unready: float) -> DecodeState | None:
        """Return the request with the highest priority that lacks pages, the first of equals."""
        waiting = self._turns.in_turn()
        lacking = (each for each in waiting if each.attempt.num_pages <= num_unready)
        return max(lacking, key=lambda state: state.priority, default=None)

    def by_class(self) -> Counter[PriorityClass]:
        return Counter(class_of(state.priority) for state in self)


class TransferQueue(AttemptQueue):
    """Requests with a granted attempt.

    Args:
        kept: slots and pages that admission leaves free for them, because they will join.
    """

    stage = RequestStage.TRANSFER

    def __init__(self, cancel: Callable[[DecodeState, str], None], kept: KeptCapacity) -> None:
        super().__init__(cancel)
        self._kept = kept
        self._migrating: dict[int, DecodeState] = {}  # migrations to this node, by key
        self._completed: dict[int, DecodeState] = {}  # by key

    @property
    def num_waiting(self) -> int:
        return 0

    def put(self, state: DecodeState) -> None:
        super().put(state)
        self._kept.slots += 1
        self._kept.pages += state.attempt.growth_pages
        if state.attempt.migrates:
            self._migrating[state.key] = state

    def take(self, state: DecodeState) -> None:
        super().take(state)
        self._kept.slots -= 1
        self._kept.pages -= state.attempt.growth_pages
        self._migrating.pop(state.key, None)
        self._completed.pop(state.key, None)

    def complete(self, state: DecodeState) -> None:
        """Record that the KV of a request has arrived and is correct."""
        state.attempt.held = True
        self._completed[state.key] = state

    @property
    def num_coming(self) -> int:
        """Number of migrations that are not completed."""
        return sum(not state.attempt.held for state in self._migrating.values())

    @property
    def is_arriving(self) -> bool:
        """Return whether a migrating request has stopped at its source and is not completed."""
        attempts = (state.attempt for state in self._migrating.values())
        return any(attempt.output is not None and not attempt.held for attempt in attempts)

    def ready(self) -> list[DecodeState]:
        """Return the requests whose KV has arrived, in order of completion."""
        return list(self._completed.values())

    def num_unready(self, most: int) -> float:
        """Return how many more pages may be granted. Attempts without a first token wait for the
        producer's prefill queue, and may hold `most` pages together. The first granted attempt may
        have any number.
        """
        if not self._states:
            return math.inf
        attempts = (state.attempt for state in self._states.values())
        unready = (each.reserved for each in attempts if each.output is None)
        return most - sum(len(each.holding.flat()) for each in unready)


class DecodeQueues(RequestQueues):
    """The queues of a decode node."""

    def __init__(
        self,
        *,
        preparing: PreparationStages[DecodeState],
        paused: PausedQueue,
        unpaired: UnpairedQueue,
        fetching: PrefixFetchQueue,
        prealloc: PreallocQueue,
        transfer: TransferQueue,
        scheduled: SchedulerQueue[DecodeState],
    ) -> None:
        super().__init__(scheduled, preparing, paused, unpaired, fetching, prealloc, transfer)
        self.preparing = preparing
        self.paused = paused
        self.unpaired = unpaired
        self.fetching = fetching
        self.prealloc = prealloc
        self.transfer = transfer
