"""Requests that wait for prefill, their order, and the prompts whose KV is being computed.

A request is held back while a prompt being computed will soon put a good part of its prefix into
the cache. Of several requests with a common prefix in one namespace, one goes first.

The policy decides the order in which the queue is tried. Higher priorities (common/limits.py) go
first. The policy orders requests of equal priority. A waiting request rises by one level per
STEP_S. slack and fcfs apply the same levels as seconds.

slack       earliest start deadline first; equal ones in order of arrival
fcfs        order of arrival
lpm         longest cached prefix first; fcfs while the queue is long, because of the cost
dfs-weight  depth first through the prefix tree, branches with most requests first
lof         longest output first
random      any
routing-key requests whose key is most frequent on the device first; those without such a key last
"""

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeAlias

import numpy as np

from common.queueing import STEP_S, PriorityClass, class_of
from common.requests.namespace import Namespace
from engine.batch.request import Ints, Request
from engine.kv_cache.radix import PrefixCache
from engine.kv_cache.radix_nodes import last_boundary
from engine.scheduler.arrivals import PriorityQueue

PolicyName = Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]
LPM_MAX_WAITING = 128
_LAST = (1, 0)  # after every branch, whose weights are negative


_Order: TypeAlias = Callable[[Collection[Request]], list[Request]]

WORTH_WAITING_TOKENS = 32
MAX_LOOKED_AT = 128  # requests tried per batch: bounds the cost of a long queue


class SchedulePolicy:
    """The order of requests that wait for prefill. Equal ones stay in order of arrival.

    Args:
        routing_keys: counts the requests on the device per routing key.
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
    """Sort by priority level, and by `order` within a level. A waiting request rises to the level
    of the most urgent one in the queue and no further."""

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
    """Waiting requests by key. Those that were on the device before come first."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._returned: deque[Request] = deque()
        self._num_returns = 0
        self._requests: PriorityQueue[int, Request] = PriorityQueue()
        self._quarantined: set[int] = set()  # by key
        self._priorities: Counter[int] = Counter()

    @property
    def has_quarantined(self) -> bool:
        """Return whether a request is here that must be computed alone."""
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
        """Highest priority in the queue; -inf if it is empty."""
        return max(self._priorities, default=-math.inf)

    def by_class(self) -> Counter[PriorityClass]:
        return Counter(class_of(priority) for priority in self._priorities.elements())

    def most_urgent(self) -> Request:
        """Return the request of the highest priority. The queue must not be empty."""
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
        """Return the requests to try next: a copy, at most MAX_LOOKED_AT."""
        fresh = self._policy.order(list(self._requests))
        return [*self._returned, *fresh][:MAX_LOOKED_AT]

    def _note(self, request: Request) -> None:
        self._priorities[request.spec.priority] += 1
        if request.quarantined:
            self._quarantined.add(request.key)


class ActivePrefills:
    """Admitted prompts that the cache lacks in part, by namespace and first page.

    Args:
        states: others can continue only from the positions at which these prompts leave a
            state.
    """

    def __init__(self, page_size: int, *, states: bool = False) -> None:
        self._page_size = page_size
        self._states = states
        self._by_first_page: dict[bytes, dict[int, Ints]] = {}
        self._left: dict[int, int] = {}  # request key: tokens to compute

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are admitted and not computed yet."""
        return sum(self._left.values())

    def add(self, request: Request, num_tokens: int) -> None:
        first_page = self._first_page(request.token_ids, request.namespace)
        self._by_first_page.setdefault(first_page, {})[request.key] = request.token_ids
        self._left[request.key] = num_tokens

    def computed(self, request: Request, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens have KV. The prompt is removed after the last
        one."""
        self._left[request.key] -= num_tokens
        if not self._left[request.key]:
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a prompt that is computed or ended. Does nothing if it is not here."""
        if self._left.pop(request.key, None) is None:
            return
        first_page = self._first_page(request.token_ids, request.namespace)
        del self._by_first_page[first_page][request.key]
        if not self._by_first_page[first_page]:
            del self._by_first_page[first_page]

    def worth_waiting(self, token_ids: Ints, namespace: Namespace, cached_tokens: int) -> bool:
        """Return whether the cache will soon hold many more of these tokens than now."""
        wanted = cached_tokens + WORTH_WAITING_TOKENS
        if len(token_ids) < wanted:
            return False
        under_way = self._by_first_page.get(self._first_page(token_ids, namespace), {})
        return any(self._left_by(other, token_ids) >= wanted for other in under_way.values())

    def _left_by(self, other: Ints, token_ids: Ints) -> int:
        """Return how many of these tokens can be reused once `other` is computed."""
        common = self._common_tokens(token_ids, other)
        if not self._states:
            return common
        last = last_boundary(len(other), self._page_size)
        return last if last <= common else 0

    def _common_tokens(self, one: Ints, other: Ints) -> int:
        """Return the number of tokens in the whole pages that both begin with."""
        length = min(len(one), len(other))
        differs = np.flatnonzero(one[:length] != other[:length])
        common = int(differs[0]) if len(differs) else length
        return common // self._page_size * self._page_size

    def _first_page(self, token_ids: Ints, namespace: Namespace) -> bytes:
        return namespace + token_ids[: self._page_size].tobytes()
