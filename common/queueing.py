"""The order of a queue, how fast it drains, and how long a new request would wait in it.

A queue holds everything that waits for one resource: prompts that wait for forward passes (in
tokens, cached or not) or requests that wait for KV (in pages). It is ordered by start deadline or
by arrival, shifted by priority. The cost of a unit is measured from recently served units. It
includes everything else that took time, such as other rows of a forward pass, other processes on
the machine, or waits for pages. Time with an empty queue does not count.

The caller provides the clock.
"""

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from typing import Literal, NamedTuple, TypeAlias, get_args

from common.errors import QueueFull

# Priorities are integers, higher is more urgent. Each step counts as STEP_S seconds of queue time:
# a request with a head start of n seconds goes before requests that arrived up to n seconds
# earlier, and after older ones. So urgent requests hardly wait, and others wait longer but do not
# starve.
STEP_S = 10.0

PriorityClass: TypeAlias = Literal["low", "normal", "high"]  # below, at and above 0, for metrics
CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)


def head_start_s(priority: int) -> float:
    return priority * STEP_S


def class_of(priority: int) -> PriorityClass:
    return CLASSES[(priority > 0) - (priority < 0) + 1]


class QueueEntry(NamedTuple):
    """An entry of the queue.

    Attributes:
        start_by: time by which it must start, on the caller's clock. -inf: before all others.
        priority: higher goes first.
        came: arrival time, in a queue ordered by arrival. None: ordered by `start_by`.
    """

    start_by: float
    units: int
    priority: int = 0
    came: float | None = None

    @property
    def turn(self) -> float:
        """Sort key: the lowest goes first."""
        turn = self.start_by if self.came is None else self.came
        return turn - head_start_s(self.priority)


class QueueModel:
    """An ordered queue. For one thread.

    Attributes:
        units: number of units that all entries need.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[object, tuple[float, QueueEntry, int]] = {}  # turn, entry, number
        self._order: list[
            tuple[float, QueueEntry, int]
        ] = []  # the same entries in order of service
        self.units = 0

    def __len__(self) -> int:
        return len(self._order)

    def units_of(self, who: object) -> int:
        """Return the units of an entry, or 0 if it is not in the queue."""
        entry = self._waiting.get(who)
        return entry[1].units if entry is not None else 0

    def join(self, who: object, place: QueueEntry) -> None:
        """Add an entry that is not in the queue yet."""
        entry = (place.turn, place, next(self._numbers))
        self._waiting[who] = entry
        insort(self._order, entry)
        self.units += place.units

    def leave(self, who: object) -> None:
        """Remove an entry. Does nothing if it is not in the queue."""
        entry = self._waiting.pop(who, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]
            self.units -= entry[1].units

    def late_s(self, newcomer: QueueEntry, *, begins: float, unit_s: float) -> tuple[float, float]:
        """Return how late a newcomer would make itself or others, and how long it would wait.

        Only entries behind the newcomer are examined.

        Args:
            begins: time at which the first entry starts, on the caller's clock.
        Returns:
            First, the highest lateness in seconds, of the newcomer or of an entry behind it that
            has at least its priority and would be in time without it. 0.0 or less: all are in time.
            Second, seconds until the newcomer starts.
        """
        behind = [place for _, place, _ in self._order[self._first_behind(newcomer) :]]
        own_s = newcomer.units * unit_s
        ahead_s = unit_s * (self.units - sum(place.units for place in behind))
        latest_s, at = begins + ahead_s - newcomer.start_by, begins + ahead_s
        for place in behind:
            if at <= place.start_by and place.priority >= newcomer.priority:
                latest_s = max(latest_s, at + own_s - place.start_by)
            at += place.units * unit_s
        return latest_s, ahead_s

    def _first_behind(self, newcomer: QueueEntry) -> int:
        return bisect_right(self._order, newcomer.turn, key=lambda entry: entry[0])


FIRST_SAMPLES = 2  # ignored samples at the start, which include compilation and allocation
ENOUGH_SAMPLES = 8  # samples before the first estimate
KEPT = 0.97  # decay of old samples at each new one: about the last 30 count
PATIENCE = 4.0  # a sample counts as at most this many times its expected duration,
STALL_S = 1.0  # or this long: a process that was stalled for a while is not slow afterwards


class QueueBacklog(NamedTuple):
    """State of a queue, as a node reports it.

    Attributes:
        queued_s: seconds until everything in the queue is served.
        unit_s: seconds per unit. 0.0: not known yet, and then `queued_s` is 0 too.
    """

    queued_s: float = 0.0
    unit_s: float = 0.0


def may_wait_s(queue_s: float, budget_s: float, work_s: float) -> float:
    """Return how many seconds a request may wait to be scheduled.

    Args:
        queue_s: requested limit of the queue time.
        budget_s: seconds until the request must have ended.
        work_s: expected seconds of work after the wait, for which at most half of the budget is
            kept free because it is an estimate.
    """
    return min(queue_s, budget_s - min(work_s, budget_s / 2))


class QueueEstimator:
    """A queue with a measured drain rate. For one thread. Each entry has a new key."""

    def __init__(self) -> None:
        self._line = QueueModel()  # by key
        self._served = 0  # units served since the last sample
        self._since = 0.0  # time of the last sample, or of the first entry after an empty queue
        self._num_samples = 0
        self._seconds = 0.0  # weighted sums over samples
        self._units = 0.0

    @property
    def unit_s(self) -> float:
        """Seconds per unit. 0.0: not known yet."""
        return self._seconds / self._units if self._num_samples >= ENOUGH_SAMPLES else 0.0

    @property
    def queued_s(self) -> float:
        return self._line.units * self.unit_s

    @property
    def backlog(self) -> QueueBacklog:
        return QueueBacklog(round(self.queued_s, 4), round(self.unit_s, 9))

    def check(self, newcomer: QueueEntry, now: float) -> None:
        """Raise QueueFull if the newcomer would be late, or would make another entry late.

        Accepts everything while the queue is empty or the rate is unknown.
        """
        unit_s = self.unit_s
        if not self._line or not unit_s:
            return
        late, ahead_s = self._line.late_s(newcomer, begins=now, unit_s=unit_s)
        if late > 0.0:
            raise QueueFull(
                f"overloaded: {ahead_s:.2f} s of work are queued before this request, "
                f"{late:.2f} s more than it may wait",
                retry_after_s=late,
            )

    def join(self, key: int, place: QueueEntry, now: float) -> None:
        if not self._line:
            self._since = now
        self._line.join(key, place)

    def serve(self, key: int, left: int = 0) -> None:
        """Record that an entry has `left` units left.

        Ignored if the entry is not in the queue or has fewer units left already, because it may be
        recomputed. A partly served entry goes before all others.
        """
        units = self._line.units_of(key)
        if left >= units:
            return
        self._served += units - left
        self._line.leave(key)
        if left:
            self._line.join(key, QueueEntry(-math.inf, left))

    def leave(self, key: int) -> None:
        self._line.leave(key)

    def tick(self, now: float) -> None:
        """Update the drain rate from the units served since the last call."""
        if not self._served:
            return
        self._num_samples += 1
        if self._num_samples > FIRST_SAMPLES:
            self._learn(now - self._since)
        self._served, self._since = 0, now

    def _learn(self, seconds: float) -> None:
        if self._num_samples > ENOUGH_SAMPLES:
            seconds = min(seconds, max(PATIENCE * self._served * self.unit_s, STALL_S))
        self._seconds = KEPT * self._seconds + seconds
        self._units = KEPT * self._units + self._served
