"""Who came first: the order of every queue for pages, and how long it may be left.

Room goes by arrival; what is urgent counts as having come so much earlier (common/priority.py).
What does not fit yet may be overtaken by what does, for a while, so that nothing lies idle; after
that nobody passes whose place is behind. Where clients are known, those with equal priority take
turns. What waits, a prompt to be computed or KV to be read,
makes no difference. This module knows nothing of what a place in a queue is for.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from common.priority import head_start_s

SKIP_AHEAD_S = 2.0  # who has waited longer than this is not overtaken any more from behind


class InLine(Protocol):
    @property
    def place(self) -> float:
        """The least goes first; as Request's."""
        ...


class OfClient(InLine, Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def client(self) -> int:
        """Its number; 0: not known."""
        ...

    @property
    def client_weight(self) -> float:
        """The client's share beside others, above 0."""
        ...


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", bound=InLine)
_Owned = TypeVar("_Owned", bound=OfClient)


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


@dataclass(slots=True, eq=False)
class _Line(Generic[_Owned]):
    """What one client has waiting, by place.

    Attributes:
        number: of all lines that ever were.
        round: in which the foremost has its turn.
    """

    number: int
    round: float
    waiting: list[_Owned] = field(default_factory=list)

    @property
    def turn(self) -> "_Turn[_Owned]":
        """Of the foremost. The least goes first."""
        return self.round, self.waiting[0].place, self.number, 0, self.waiting


# Round, place, number of the line, index in it, all of it.
_Turn = tuple[float, float, int, int, list[_Owned]]


class _Rounds(Generic[_Owned]):
    """Requests of one priority. Falsy where there are none."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[_Owned]] = {}  # by client; none is empty
        self._turns: list[_Turn[_Owned]] = []  # of all lines, in order
        self._served = 0.0  # the round that was served last
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def in_turn(self) -> Iterator[_Owned]:
        turns = self._turns.copy()  # in order: a heap
        while turns:
            at, _, number, index, waiting = turns[0]
            yield (value := waiting[index])
            if index + 1 < len(waiting):
                behind = waiting[index + 1]
                turn = (at + 1 / value.client_weight, behind.place, number, index + 1, waiting)
                heapq.heapreplace(turns, turn)
            else:
                heapq.heappop(turns)

    def put(self, value: _Owned) -> None:
        line = self._lines.get(value.client)
        if line is None:
            line = self._lines[value.client] = _Line(next(self._numbers), self._served + 1.0)
        else:
            self._forget_turn(line)
        insort(line.waiting, value, key=lambda each: each.place)
        insort(self._turns, line.turn)

    def take(self, value: _Owned, *, served: bool) -> None:
        """
        Args:
            served: whether it was its client's turn.
        """
        line = self._lines[value.client]
        self._forget_turn(line)
        if served:
            self._served = line.round
            line.round += 1 / value.client_weight
        line.waiting.remove(value)
        if line.waiting:
            insort(self._turns, line.turn)
        else:
            del self._lines[value.client]

    def _forget_turn(self, line: _Line[_Owned]) -> None:
        del self._turns[bisect_left(self._turns, line.turn)]


class FairQueue(Generic[_Key, _Owned]):
    """A queue by key and place, in which clients take turns.

    The places say when a request of some priority has its turn, as in ByPlace. Which request of
    that priority has it goes round by client: one request of each client in each round, of weight 2
    two. A client that comes joins the next round. In a round the places decide. So no client waits
    for more than a round of others, however many requests or clients come.
    """

    def __init__(self) -> None:
        self._by_place: ByPlace[_Key, _Owned] = ByPlace()
        self._rounds: dict[int, _Rounds[_Owned]] = {}  # by priority; none is empty

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[_Owned]:
        """By place alone."""
        return iter(self._by_place)

    def in_turn(self) -> Iterator[_Owned]:
        """Yield all in the order in which they have their turns. Ends with the first change."""
        turns = {priority: rounds.in_turn() for priority, rounds in self._rounds.items()}
        for position in self._by_place:
            yield next(turns[position.priority])

    def put(self, key: _Key, value: _Owned) -> None:
        self._by_place.put(key, value)
        self._rounds.setdefault(value.priority, _Rounds()).put(value)

    def serve(self, key: _Key) -> _Owned | None:
        """Take one out, which is its client's turn; None where it is not here."""
        return self._take(key, served=True)

    def take(self, key: _Key) -> _Owned | None:
        """Take one out that has no turn; None where it is not here."""
        return self._take(key, served=False)

    def _take(self, key: _Key, *, served: bool) -> _Owned | None:
        value = self._by_place.take(key)
        if value is not None:
            rounds = self._rounds[value.priority]
            rounds.take(value, served=served)
            if not rounds:
                del self._rounds[value.priority]
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
