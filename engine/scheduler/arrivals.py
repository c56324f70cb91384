"""The order of all queues for pages, and the maximum time that a request may be overtaken.

Capacity is given in order of arrival. A higher priority counts as an earlier arrival
(common/limits.py). A request that does not fit yet may be overtaken by requests that do, for a
limited time, so that no capacity is idle. After that time no request behind it may pass. If clients
are known, those of equal priority take turns. The rules are the same for prompts to be computed and
for KV to be read. This module does not know the purpose of a queue.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from common.queueing import head_start_s

SKIP_AHEAD_S = 2.0  # requests that waited longer are not overtaken any more


class QueuedItem(Protocol):
    @property
    def queue_position(self) -> float:
        """Position in the queue, lowest first; see `Request.queue_position`."""
        ...


class OfClient(QueuedItem, Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def client(self) -> int:
        """The client's number; 0: unknown."""
        ...

    @property
    def client_weight(self) -> float:
        """The client's share relative to other clients, above 0."""
        ...


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", bound=QueuedItem)
_Owned = TypeVar("_Owned", bound=OfClient)


class PriorityQueue(Generic[_Key, _Value]):
    """A queue by key. A request that arrives late, from another queue, is inserted at its place.

    Attributes:
        num_changes: total number of insertions and removals.
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
        if value.queue_position < last.queue_position:
            places = sorted(self._values.items(), key=lambda item: item[1].queue_position)
            self._values = dict(places)

    def take(self, key: _Key) -> _Value | None:
        """Remove and return it, or return None if it is not in the queue."""
        value = self._values.pop(key, None)
        self.num_changes += value is not None
        return value


@dataclass(slots=True, eq=False)
class _Line(Generic[_Owned]):
    """The waiting requests of one client, by place.

    Attributes:
        number: unique among all lines ever created.
        round: the round in which the first request has its turn.
    """

    number: int
    round: float
    waiting: list[_Owned] = field(default_factory=list)

    @property
    def turn(self) -> "_Turn[_Owned]":
        """The turn of the first request. The lowest turn goes first."""
        return self.round, self.waiting[0].queue_position, self.number, 0, self.waiting


# Round, place, number of the line, index in the line, all requests of the line.
_Turn = tuple[float, float, int, int, list[_Owned]]


class _Rounds(Generic[_Owned]):
    """Requests of one priority. False if there are none."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[_Owned]] = {}  # by client, never empty
        self._turns: list[_Turn[_Owned]] = []  # of all lines, in order
        self._served = 0.0  # the round of the last served request
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def in_turn(self) -> Iterator[_Owned]:
        turns = self._turns.copy()  # a sorted list is a valid heap
        while turns:
            at, _, number, index, waiting = turns[0]
            yield (value := waiting[index])
            if index + 1 < len(waiting):
                behind = waiting[index + 1]
                turn = (
                    at + 1 / value.client_weight,
                    behind.queue_position,
                    number,
                    index + 1,
                    waiting,
                )
                heapq.heapreplace(turns, turn)
            else:
                heapq.heappop(turns)

    def put(self, value: _Owned) -> None:
        line = self._lines.get(value.client)
        if line is None:
            line = self._lines[value.client] = _Line(next(self._numbers), self._served + 1.0)
        else:
            self._forget_turn(line)
        insort(line.waiting, value, key=lambda each: each.queue_position)
        insort(self._turns, line.turn)

    def take(self, value: _Owned, *, served: bool) -> None:
        """Remove a request.

        Args:
            served: whether it is removed because it was its client's turn.
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

    The places decide when a request of a given priority has its turn, as in PriorityQueue. Among
    requests of that priority, clients take turns: each round serves one request of each client, or
    two of a client with weight 2. A new client joins the next round. Within a round the places
    decide. A client therefore waits for at most one round of others, however many requests or
    clients arrive.
    """

    def __init__(self) -> None:
        self._by_place: PriorityQueue[_Key, _Owned] = PriorityQueue()
        self._rounds: dict[int, _Rounds[_Owned]] = {}  # by priority, never empty

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[_Owned]:
        """Iterate by place alone."""
        return iter(self._by_place)

    def in_turn(self) -> Iterator[_Owned]:
        """Yield all requests in the order of their turns. The iterator is invalid after a
        change."""
        turns = {priority: rounds.in_turn() for priority, rounds in self._rounds.items()}
        for position in self._by_place:
            yield next(turns[position.priority])

    def put(self, key: _Key, value: _Owned) -> None:
        self._by_place.put(key, value)
        self._rounds.setdefault(value.priority, _Rounds()).put(value)

    def serve(self, key: _Key) -> _Owned | None:
        """Remove a request whose turn it is. Return None if it is not in the queue."""
        return self._take(key, served=True)

    def take(self, key: _Key) -> _Owned | None:
        """Remove a request out of turn. Return None if it is not in the queue."""
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
class PageClaim:
    """The claim of another queue's first request on pages and a slot."""

    arrived: float
    num_pages: int
    priority: int = 0

    @property
    def queue_position(self) -> float:
        return self.arrived - head_start_s(self.priority)


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Pages and slots that may be allocated now."""

    num_pages: int
    num_slots: int

    def fits(self, num_pages: int) -> bool:
        """Return whether a request that needs this many pages and one slot fits."""
        return self.num_slots > 0 and num_pages <= self.num_pages

    def without(self, num_pages: int) -> "FreeCapacity":
        """Return the remaining capacity after a request that fits got its pages and its slot."""
        return FreeCapacity(self.num_pages - num_pages, self.num_slots - 1)


def is_overdue(arrived: float, now: float) -> bool:
    """Return whether it has waited so long that no request behind it may overtake it."""
    return now - arrived > SKIP_AHEAD_S
