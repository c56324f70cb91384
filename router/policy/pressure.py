"""Temporary limit of the queue time during overload, so that all requests are treated alike.

In a lasting overload, requests with a long wait limit would fill every queue, and requests with a
short limit would always be rejected. So for a while after a rejection, the limit of the rejected
request applies to all requests of at most its priority. The queue is then as short as the shortest
limit requires (docs/benchmarks/overload.md). Higher priorities are not limited.
"""

import math

LASTING_S = 1.0  # after a rejection
LEAST_S = 0.5  # lower bound of the limit: a shorter queue would run empty now and then


class PoolPressure:
    """Limits by priority. For one thread. The caller provides the clock."""

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
