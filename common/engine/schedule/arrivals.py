"""Who came first: the order of every queue for pages, and how long it may be left.

Room goes by arrival; what is urgent counts as having come so much earlier (common/priority.py).
What does not fit yet may be overtaken by what does, for a while, so that nothing lies idle; after
that nobody passes whose place is behind. What waits, a prompt to be computed or KV to be read,
makes no difference. This module knows nothing of what a place in a queue is for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.priority import head_start_s

SKIP_AHEAD_S = 2.0  # who has waited longer than this is not overtaken any more from behind


class InLine(Protocol):
    @property
    def place(self) -> float:
        """The least goes first; as Request's."""
        ...


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", bound=InLine)


class ByPlace(Generic[_Key, _Value]):
    """A queue by key. Who comes to it late, from another queue, goes where its place is.

    Attributes:
        num_changes: counts who came and who left, ever.
    """

    def __init__(self) -> None:
        self._values: dict[_Key, _Value] = {}
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[_Value]:
        return iter(self._values.values())

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def put(self, key: _Key, value: _Value) -> None:
        last = next(reversed(self._values.values()), value)
        self._values[key] = value
        self.num_changes += 1
        if value.place < last.place:
            places = sorted(self._values.items(), key=lambda item: item[1].place)
            self._values = dict(places)

    def take(self, key: _Key) -> _Value | None:
        """Takes it out; None where it is not here."""
        value = self._values.pop(key, None)
        self.num_changes += value is not None
        return value


@dataclass(frozen=True, slots=True)
class Claim:
    """On pages, and a slot, of the first one in another queue."""

    arrived: float
    num_pages: int
    priority: int = 0

    @property
    def place(self) -> float:
        return self.arrived - head_start_s(self.priority)


@dataclass(frozen=True, slots=True)
class Room:
    """Pages and slots that may be given away now."""

    num_pages: int
    num_slots: int

    def fits(self, num_pages: int) -> bool:
        """For one that needs so many pages, and a slot?"""
        return self.num_slots > 0 and num_pages <= self.num_pages

    def without(self, num_pages: int) -> "Room":
        """What is left once one that fits has got so many pages and its slot."""
        return Room(self.num_pages - num_pages, self.num_slots - 1)


def is_overdue(arrived: float, now: float) -> bool:
    """Has it waited so long that nobody whose place is behind may overtake it?"""
    return now - arrived > SKIP_AHEAD_S
