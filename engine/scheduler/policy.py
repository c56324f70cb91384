"""SchedulePolicy: the order in which the waiting queue is tried. Admission decides which fit.

Higher priorities (common/priority.py) go first. The policy orders requests of equal priority. A
waiting request rises by one level per STEP_S. slack and fcfs apply the same levels as seconds.

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
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias

from common.priority import STEP_S
from engine.batch.request import Request
from engine.kv_cache.radix import PrefixCache

PolicyName = Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]
LPM_MAX_WAITING = 128
_LAST = (1, 0)  # after every branch, whose weights are negative


_Order: TypeAlias = Callable[[Collection[Request]], list[Request]]


class SchedulePolicy:
    """The order of requests that wait for prefill. Equal ones stay in order of arrival.

    Args:
        routing_keys: counts the requests on the device per routing key.
    """

    def __init__(
        self, name: PolicyName, cache: PrefixCache, routing_keys: Callable[[], Counter[int]]
    ) -> None:
        self._cache = cache
        self._routing_keys = routing_keys
        self._random = random.Random(0)
        orders: dict[str, _Order] = {
            "slack": self._soonest,
            "fcfs": list,
            "lpm": _urgent_first(self._longest_prefix),
            "dfs-weight": _urgent_first(self._depth_first),
            "lof": _urgent_first(self._longest_output),
            "random": _urgent_first(self._shuffled),
            "routing-key": _urgent_first(self._most_frequent_key),
        }
        self.order = orders[name]

    @staticmethod
    def _soonest(waiting: Collection[Request]) -> list[Request]:
        return sorted(waiting, key=lambda r: r.turn)

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


def _urgent_first(order: _Order) -> _Order:
    """Sort by priority level, and by `order` within a level. A waiting request rises to the level
    of the most urgent one in the queue and no further."""

    def by_level(waiting: Collection[Request]) -> list[Request]:
        ordered = order(waiting)
        priorities = {request.spec.priority for request in waiting}
        if len(priorities) < 2:
            return ordered
        now, top = time.monotonic(), max(priorities)
        return sorted(ordered, key=lambda r: -min(top, math.floor((now - r.place) / STEP_S)))

    return by_level
