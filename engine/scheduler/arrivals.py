"""Waiting queues, their order, and the limit on overtaking.

Capacity is given in order of arrival. A higher priority counts as an earlier arrival
(common/queueing.py). Smaller requests may overtake a request that does not fit yet, so that no
capacity is idle, but not after SKIP_AHEAD_S. Known clients take turns with requests of equal
priority. The same rules hold for prompts to be computed and for KV to be read.

Requests that wait for prefill are in a `WaitingQueue`. A request is held back while a running
prefill will soon add a good part of its prefix to the prefix cache. Requests with a common prefix
therefore do not compute it twice.

A schedule policy orders requests of equal priority in this queue. A waiting request rises by one
level per STEP_S. slack and fcfs apply the same levels as seconds.

slack       earliest start deadline first, equal ones in order of arrival
fcfs        order of arrival
lpm         longest cached prefix first, or fcfs while the queue is long, because of the cost
dfs-weight  depth first through the prefix tree, branches with most requests first
lof         longest output first
random      any
routing-key requests whose key is most frequent on the device first, then those without a key
"""

import heapq
import math
import random
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from common.queueing import STEP_S, PriorityClass, class_of, head_start_s
from common.requests.namespace import Namespace
from engine.batch.request import Ints, Request
from engine.kv_cache.radix import PrefixCache
from engine.kv_cache.radix_nodes import last_boundary

SKIP_AHEAD_S = 2.0  # after this wait, no request behind may overtake


class QueuedItem(Protocol):
    @property
    def queue_position(self) -> float:
        """Position in the queue. The lowest goes first. See `Request.queue_position`."""
        ...


class OfClient(QueuedItem, Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def client(self) -> int:
        """Number of the client. 0: unknown."""
        ...

    @property
    def client_weight(self) -> float:
        """Share of the client relative to other clients, above 0."""
        ...


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", bound=QueuedItem)
_Owned = TypeVar("_Owned", bound=OfClient)


class PriorityQueue(Generic[_Key, _Value]):
    """A queue ordered by `queue_position`, with access by key. A request that arrives late from
    another queue is inserted at its position.

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
        """Remove and return the value, or return None if it is not in the queue."""
        value = self._values.pop(key, None)
        self.num_changes += value is not None
        return value


@dataclass(slots=True, eq=False)
class _Line(Generic[_Owned]):
    """The waiting requests of one client, by queue position.

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


# Round, position, number of the line, index in the line, all requests of the line.
_Turn = tuple[float, float, int, int, list[_Owned]]


class _Rounds(Generic[_Owned]):
    """The requests of one priority. False if there are none."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[_Owned]] = {}  # by client, without empty lines
        self._turns: list[_Turn[_Owned]] = []  # turns of all lines, in order
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
    """A fair queue: clients of equal priority take turns.

    The queue positions decide when a priority has its turn, as in PriorityQueue. Among requests of
    that priority, clients take turns. Each round serves one request of each client, or two of a
    client with weight 2. A new client joins the next round. Within a round, queue positions decide.
    A client therefore waits for at most one round of others, however many requests or clients
    arrive.
    """

    def __init__(self) -> None:
        self._by_place: PriorityQueue[_Key, _Owned] = PriorityQueue()
        self._rounds: dict[int, _Rounds[_Owned]] = {}  # by priority, without empty rounds

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[_Owned]:
        """Iterate in the order of queue positions, without turns."""
        return iter(self._by_place)

    def in_turn(self) -> Iterator[_Owned]:
        """Yield all requests in the order of their turns. A change of the queue invalidates the
        iterator."""
        turns = {priority: rounds.in_turn() for priority, rounds in self._rounds.items()}
        for position in self._by_place:
            yield next(turns[position.priority])

    def put(self, key: _Key, value: _Owned) -> None:
        self._by_place.put(key, value)
        self._rounds.setdefault(value.priority, _Rounds()).put(value)

    def serve(self, key: _Key) -> _Owned | None:
        """Remove and return a request whose turn it is. Return None if it is not in the queue."""
        return self._take(key, served=True)

    def take(self, key: _Key) -> _Owned | None:
        """Remove and return a request out of turn. Return None if it is not in the queue."""
        return self._take(key, served=False)

    def _take(self, key: _Key, *, served: bool) -> _Owned | None:
        value = self._by_place.take(key)
        if value is not None:
            rounds = self._rounds[value.priority]
            rounds.take(value, served=served)
            if not rounds:
                del self._rounds[value.priority]
        return value


class PageDemand(msgspec.Struct, frozen=True):
    """The pages and the slot that the first request of another queue needs and does not hold."""

    arrived: float
    num_pages: int
    priority: int = 0

    @property
    def queue_position(self) -> float:
        return self.arrived - head_start_s(self.priority)


class FreeCapacity(msgspec.Struct, frozen=True):
    """Pages and slots that may be allocated now."""

    num_pages: int
    num_slots: int

    def fits(self, num_pages: int) -> bool:
        """Return whether a request that needs this many pages and one slot fits."""
        return self.num_slots > 0 and num_pages <= self.num_pages

    def without(self, num_pages: int) -> "FreeCapacity":
        """Return the capacity that is left after a request gets a slot and this many pages."""
        return FreeCapacity(self.num_pages - num_pages, self.num_slots - 1)


@dataclass(slots=True)
class KeptCapacity:
    """Capacity that admission keeps for requests that will join with KV from another node.

    Attributes:
        slots: one for each joining request that already holds pages. Without a slot it could
            neither run nor be retracted, and the last running request could wait for its pages
            forever.
        pages: pages for the growth of joining requests.
        barrier: requests with a later queue position wait, because a joining request ahead of them
            has waited too long for capacity.
        most_urgent: highest priority of joining requests that wait for capacity. -inf: none.
    """

    slots: int = 0
    pages: int = 0
    barrier: float = math.inf
    most_urgent: float = -math.inf


def is_overdue(arrived: float, now: float) -> bool:
    """Return whether a request has waited so long that no request behind it may overtake it."""
    return now - arrived > SKIP_AHEAD_S


PolicyName = Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]
LPM_MAX_WAITING = 128
_LAST = (1, 0)  # after every branch, whose weights are negative


_Order: TypeAlias = Callable[[Collection[Request]], list[Request]]

WORTH_WAITING_TOKENS = 32
MAX_LOOKED_AT = 128  # limits the cost of a long queue


class SchedulePolicy:
    """The order of requests that wait for prefill. Requests that a policy ranks equal stay in order
    of arrival.

    Args:
        routing_keys: number of requests on the device per routing key.
    """

    def __init__(
        self,
        name: PolicyName,
        cache: PrefixCache,
        routing_keys: Callable[[], Counter[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._routing_keys = routing_keys
        self._random = random.Random(0)
        orders: dict[str, _Order] = {
            "slack": self._soonest,
            "fcfs": list,
            "lpm": _urgent_first(self._longest_prefix, clock),
            "dfs-weight": _urgent_first(self._depth_first, clock),
            "lof": _urgent_first(self._longest_output, clock),
            "random": _urgent_first(self._shuffled, clock),
            "routing-key": _urgent_first(self._most_frequent_key, clock),
        }
        self.order = orders[name]

    @staticmethod
    def _soonest(waiting: Collection[Request]) -> list[Request]:
        return sorted(waiting, key=lambda r: r.scheduling_deadline)

    def _longest_prefix(self, waiting: Collection[Request]) -> list[Request]:
        if len(waiting) > LPM_MAX_WAITING:
            return list(waiting)

        def place(request: Request) -> int:
            return -self._cache.match(request.token_ids[:-1], request.namespace).num_tokens

        return sorted(waiting, key=place)

    def _depth_first(self, waiting: Collection[Request]) -> list[Request]:
        lineages = {r.key: self._cache.lineage(r.token_ids[:-1], r.namespace) for r in waiting}
        weights: dict[int, int] = {}
        for lineage in lineages.values():
            for node in lineage:
                weights[node] = weights.get(node, 0) + 1

        def place(request: Request) -> tuple[tuple[int, int], ...]:
            return (*((-weights[node], node) for node in lineages[request.key]), _LAST)

        return sorted(waiting, key=place)

    @staticmethod
    def _longest_output(waiting: Collection[Request]) -> list[Request]:
        return sorted(waiting, key=lambda r: r.num_generated - r.sampling.max_tokens)

    def _most_frequent_key(self, waiting: Collection[Request]) -> list[Request]:
        counts = self._routing_keys()

        def place(request: Request) -> tuple[int, int]:
            count = counts[request.spec.routing_key]
            return (-count, request.spec.routing_key if count else 0)

        return sorted(waiting, key=place)

    def _shuffled(self, waiting: Collection[Request]) -> list[Request]:
        return self._random.sample(list(waiting), len(waiting))


def _urgent_first(order: _Order, clock: Callable[[], float]) -> _Order:
    """Sort by priority level, and by `order` within a level. A waiting request rises at most to the
    level of the most urgent request in the queue."""

    def by_level(waiting: Collection[Request]) -> list[Request]:
        ordered = order(waiting)
        priorities = {request.spec.priority for request in waiting}
        if len(priorities) < 2:
            return ordered
        now, top = clock(), max(priorities)

        def level(request: Request) -> int:
            return -min(top, math.floor((now - request.queue_position) / STEP_S))

        return sorted(ordered, key=level)

    return by_level


class WaitingQueue:
    """The requests that wait for prefill, by key. Requests that were on the device before come
    first."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._returned: deque[Request] = deque()
        self._num_returns = 0
        self._requests: PriorityQueue[int, Request] = PriorityQueue()
        self._quarantined: set[int] = set()  # by key
        self._priorities: Counter[int] = Counter()

    @property
    def has_quarantined(self) -> bool:
        """Return whether the queue has a request that must be computed alone."""
        return bool(self._quarantined)

    def __len__(self) -> int:
        return len(self._returned) + len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._requests

    def __contains__(self, request: Request) -> bool:
        return request.key in self._requests or request in self._returned

    @property
    def highest_priority(self) -> float:
        """Highest priority in the queue, -inf if it is empty."""
        return max(self._priorities, default=-math.inf)

    def by_class(self) -> Counter[PriorityClass]:
        return Counter(class_of(priority) for priority in self._priorities.elements())

    def most_urgent(self) -> Request:
        """Return the request with the highest priority. The queue must not be empty."""
        return max(self, key=lambda request: (request.spec.priority, -request.queue_position))

    @property
    def num_changes(self) -> int:
        """Total number of insertions and removals."""
        return self._requests.num_changes + self._num_returns

    def append(self, request: Request) -> None:
        self._requests.put(request.key, request)
        self._note(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was retracted and must be recomputed."""
        self._returned.append(request)
        self._num_returns += 1
        self._note(request)

    def remove(self, request: Request) -> None:
        self._quarantined.discard(request.key)
        self._priorities[request.spec.priority] -= 1
        if not self._priorities[request.spec.priority]:
            del self._priorities[request.spec.priority]
        if self._requests.take(request.key) is None:
            self._returned.remove(request)
            self._num_returns += 1

    def was_returned(self, request: Request) -> bool:
        return request in self._returned

    def in_order(self) -> list[Request]:
        """Return the requests to try next, at most MAX_LOOKED_AT, as a new list."""
        fresh = self._policy.order(list(self._requests))
        return [*self._returned, *fresh][:MAX_LOOKED_AT]

    def _note(self, request: Request) -> None:
        self._priorities[request.spec.priority] += 1
        if request.quarantined:
            self._quarantined.add(request.key)


class ActivePrefills:
    """Admitted prompts whose prefill is not finished, by namespace and first page. Requests with
    the same prefix wait for them.

    Args:
        states: whether the model has recurrent states, so that others can only continue where these
            prompts store a state.
    """

    def __init__(self, page_size: int, *, states: bool = False) -> None:
        self._page_size = page_size
        self._states = states
        self._by_first_page: dict[bytes, dict[int, Ints]] = {}
        self._left: dict[int, int] = {}  # request key: tokens still to compute

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens that are admitted and not computed yet."""
        return sum(self._left.values())

    def add(self, request: Request, num_tokens: int) -> None:
        first_page = self._first_page(request.token_ids, request.namespace)
        self._by_first_page.setdefault(first_page, {})[request.key] = request.token_ids
        self._left[request.key] = num_tokens

    def computed(self, request: Request, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens have KV. Remove the prompt once all have."""
        self._left[request.key] -= num_tokens
        if not self._left[request.key]:
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a prompt that is computed or has ended. Does nothing if the prompt is not here."""
        if self._left.pop(request.key, None) is None:
            return
        first_page = self._first_page(request.token_ids, request.namespace)
        del self._by_first_page[first_page][request.key]
        if not self._by_first_page[first_page]:
            del self._by_first_page[first_page]

    def worth_waiting(self, token_ids: Ints, namespace: Namespace, cached_tokens: int) -> bool:
        """Return whether the cache will soon have many more of these tokens than
        `cached_tokens`."""
        wanted = cached_tokens + WORTH_WAITING_TOKENS
        if not self._left or len(token_ids) < wanted:
            return False
        under_way = self._by_first_page.get(self._first_page(token_ids, namespace), {})
        return any(self._left_by(other, token_ids) >= wanted for other in under_way.values())

    def _left_by(self, other: Ints, token_ids: Ints) -> int:
        """Return the number of these tokens that can be reused once the prompt `other` is
        computed."""
        common = self._common_tokens(token_ids, other)
        if not self._states:
            return common
        last = last_boundary(len(other), self._page_size)
        return last if last <= common else 0

    def _common_tokens(self, one: Ints, other: Ints) -> int:
        """Return the number of tokens in the whole pages that both prompts begin with."""
        length = min(len(one), len(other))
        differs = np.flatnonzero(one[:length] != other[:length])
        common = int(differs[0]) if len(differs) else length
        return common // self._page_size * self._page_size

    def _first_page(self, token_ids: Ints, namespace: Namespace) -> bytes:
        return namespace + token_ids[: self._page_size].tobytes()
