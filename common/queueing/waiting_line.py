"""A queue ordered by start deadline or by arrival, shifted by priority.

It also computes how late entries would be if one more joined. It has no clock.
"""

import itertools
from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from common.priority import head_start_s


class QueueEntry(NamedTuple):
    """An entry of the queue.

    Attributes:
        start_by: time by which it must start, on the caller's clock. -inf: before all others.
        units: that it needs.
        priority: relative to others.
        came: arrival, in a queue ordered by arrival. None: ordered by `start_by`.
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
    """A queue. For one thread.

    Attributes:
        units: that all entries need.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[object, tuple[float, QueueEntry, int]] = {}  # turn, place, number
        self._order: list[
            tuple[float, QueueEntry, int]
        ] = []  # the same entries, in order of service
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
        """Return how late a newcomer would make itself or others, and its waiting time.

        Looks only at the entries behind the newcomer.

        Args:
            newcomer: the new entry.
            begins: time at which the first entry starts, on the caller's clock.
            unit_s: seconds per unit.
        Returns:
            First, the highest lateness in seconds of the newcomer, or of an entry behind it that
                has at least its priority and would be in time without it. 0.0 or less: all are in
                time. Second, seconds until the newcomer starts.
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
