"""Those who wait for one thing, served in order of when each must be begun, or as they came, the
urgent sooner; who is late if one more comes. Knows numbers, and neither requests nor a clock."""

import itertools
from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from common.priority import head_start_s


class Place(NamedTuple):
    """One that waits.

    Attributes:
        start_by: when it must be begun, on the clock of whoever asks; -inf: before all others.
        units: that it needs.
        priority: how urgent it is beside others.
        came: in a line that is served as they came, when it did; None: who must be begun soonest
            goes first.
    """

    start_by: float
    units: int
    priority: int = 0
    came: float | None = None

    @property
    def turn(self) -> float:
        """The least goes first."""
        turn = self.start_by if self.came is None else self.came
        return turn - head_start_s(self.priority)


class WaitingLine:
    """One thread's.

    Attributes:
        units: that all of them need.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[object, tuple[float, Place, int]] = {}  # turn, place, number
        self._order: list[tuple[float, Place, int]] = []  # the same, as they are served
        self.units = 0

    def __len__(self) -> int:
        return len(self._order)

    def units_of(self, who: object) -> int:
        """0: it does not wait."""
        entry = self._waiting.get(who)
        return entry[1].units if entry is not None else 0

    def join(self, who: object, place: Place) -> None:
        """It must not wait here already."""
        entry = (place.turn, place, next(self._numbers))
        self._waiting[who] = entry
        insort(self._order, entry)
        self.units += place.units

    def leave(self, who: object) -> None:
        """Harmless where it does not wait."""
        entry = self._waiting.pop(who, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]
            self.units -= entry[1].units

    def late_s(self, newcomer: Place, *, begins: float, unit_s: float) -> tuple[float, float]:
        """Whether the line can take one more. Looks only at those that it goes ahead of.

        Args:
            begins: when the first of them does, on the clock of their times.
        Returns:
            How long after its time the newcomer would be begun, or one that it goes ahead of, that
            is as urgent, and that would be in time without it; 0.0 or less: all are in time. And
            until the newcomer is begun.
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

    def _first_behind(self, newcomer: Place) -> int:
        return bisect_right(self._order, newcomer.turn, key=lambda entry: entry[0])
