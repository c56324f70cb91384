"""Expected queue time of a request at each node, and the nodes where it can start in time.

The prompt tokens that this router has placed on a node and that have no first token yet are known
exactly at any time. The seconds per token change slowly and are reported by the node. Their product
is the queue time. Where it is wrong, the node itself rejects the request. For requests of other
routers, only the part of the node's reported queue beyond this router's own requests is known. It
is assumed to be computed meanwhile.

A node serves the earliest start time first, with higher priorities shifted to earlier times. A
request is placed on a node only if all requests there of at least its priority still start in time.
So under overload the lowest priorities are rejected.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from common.errors import QueueFull
from common.queueing import QueueEntry, may_wait_s
from router.policy.choices import DecodeChoice
from router.policy.load import NodeLoad

_MOST_S = 1e6  # upper limit of reported values


LASTING_S = 1.0  # after a rejection
LEAST_S = 0.5  # lower bound of the limit: a shorter queue would run empty now and then


class PoolPressure:
    """Temporary limits of the queue time by priority, so that all requests are treated alike.

    In a lasting overload, requests with a long wait limit would fill every queue, and requests with
    a short limit would always be rejected. So for a while after a rejection, the limit of the
    rejected request applies to all requests of at most its priority. The queue is then as short as
    the shortest limit requires. Higher priorities are not limited. For one thread. The caller
    provides the clock.
    """

    def __init__(self) -> None:
        self._refusals: dict[int, tuple[float, float]] = {}  # by priority: limit, expiry

    def limit_s(self, now: float, priority: int = 0) -> float:
        """Return the current limit. inf: no request of at least this priority was rejected."""
        if not self._refusals:
            return math.inf
        limits = (
            limit_s
            for refused, (limit_s, until) in self._refusals.items()
            if refused >= priority and now < until
        )
        return min(limits, default=math.inf)

    def refused(self, may_wait_s: float, now: float, priority: int = 0) -> None:
        """Record the rejection of a request that could have waited `may_wait_s`."""
        may_wait_s = max(may_wait_s, LEAST_S)
        if may_wait_s <= self.limit_s(now, priority):
            self._refusals[priority] = may_wait_s, now + LASTING_S


class RequestDue(NamedTuple):
    """Times by which a request must start and end, in time.monotonic() seconds."""

    start_by: float
    deadline: float
    priority: int = 0


WHENEVER = RequestDue(math.inf, math.inf)


class _Told(NamedTuple):
    token_s: float = 0.0  # seconds per prompt token
    others_s: float = 0.0  # queue time of other routers' requests at that time
    pages_s: float = 0.0  # until pages are free for another request, at that time
    at: float = 0.0


_NOTHING = _Told()


class NodeBacklogs:
    """Queue times of all nodes.

    A node that has reported nothing counts as idle. For one event loop.
    """

    def __init__(self, load: NodeLoad, now: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._now = now
        self._pressure = PoolPressure()
        self._told: dict[str, _Told] = {}

    def told(self, address: str, *, queued_s: float, token_s: float, pages_s: float = 0.0) -> None:
        """Record the queue times that a node reports. Impossible values count as 0.

        Args:
            address: of the node.
            queued_s: seconds until all prompts queued there are computed.
            token_s: seconds per prompt token. 0.0: not known.
            pages_s: seconds until a new request would get its pages.
        """
        queued_s, token_s, pages_s = map(_believed, (queued_s, token_s, pages_s))
        own_s = self._load.queued.tokens(address) * token_s
        others_s = max(queued_s - own_s, 0.0)
        self._told[address] = _Told(token_s, others_s, pages_s, self._now())

    def forget(self, address: str) -> None:
        """Drop the reports of a node. Another node may come back at its address."""
        self._told.pop(address, None)

    def in_time(
        self, choices: Sequence[DecodeChoice], num_tokens: int, due: RequestDue
    ) -> Sequence[DecodeChoice]:
        """Return the choices, with those of their prefill nodes, that can start a prompt in time.

        Raises:
            QueueFull: there is none. `retry_after_s` is the expected time until there is one.
        """
        if due is WHENEVER:
            return choices
        nodes = {node.address for choice in choices for node in choice.prefill}
        nodes |= {choice.address for choice in choices}
        late = {
            address: by_s
            for address in nodes
            if (by_s := self._late_s(address, num_tokens, due)) > 0.0
        }
        if not late:
            return choices
        left = []
        for choice in choices:
            prefill = tuple(node for node in choice.prefill if node.address not in late)
            if choice.address not in late and (prefill or not choice.prefill):
                left.append(replace(choice, prefill=prefill))
        if not left:
            now, wait_s = self._now(), min(late.values())
            self._pressure.refused(due.start_by - now, now, due.priority)
            raise QueueFull(
                f"overloaded: what waits takes {wait_s:.2f} s longer than this request may wait, "
                "at every node",
                retry_after_s=wait_s,
            )
        return left

    def start_by(self, address: str, num_tokens: int, due: RequestDue) -> float:
        """Return the time by which a prompt must start on a node.

        -inf for a continued response, which goes before all others.
        """
        if due.start_by == math.inf:
            return -math.inf
        now = self._now()
        work_s = num_tokens * self._told.get(address, _NOTHING).token_s
        queue_s = min(due.start_by - now, self._pressure.limit_s(now, due.priority))
        return now + may_wait_s(queue_s, due.deadline - now, work_s)

    def _late_s(self, address: str, num_tokens: int, due: RequestDue) -> float:
        """Return how late the request would start, or would make another request start.

        0.0 or less: all start in time, or nothing is queued.
        """
        told, now = self._told.get(address, _NOTHING), self._now()
        line = self._load.queued.at(address)
        waits = told.token_s > 0.0 and bool(line)
        others_s, pages_s = told.others_s - (now - told.at), told.pages_s - (now - told.at)
        if not waits and others_s <= 0.0 and pages_s <= 0.0:
            return 0.0
        newcomer = QueueEntry(self.start_by(address, num_tokens, due), num_tokens, due.priority)
        begins = now + max(others_s, 0.0)
        late, _ = line.late_s(newcomer, begins=begins, unit_s=told.token_s)
        return max(late, now + pages_s - newcomer.start_by)


def _believed(value: float) -> float:
    return value if 0.0 <= value <= _MOST_S else 0.0  # rejects NaN too
