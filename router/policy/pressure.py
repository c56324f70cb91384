"""How long anybody may wait while others are refused who can wait less.

Whoever may wait longest would else fill every queue in a lasting overload: where the impatient find
no place any more, the patient still do. So for a while after one was refused nobody is let in who
would wait longer than that one might have. The queue then is as short as the least patient of those
who ask want it, and all are let in alike: `tools/bench/overload_order.py`. It is no rule for those
who are more urgent than whoever was refused.
"""

import math

LASTING_S = 1.0  # after a refusal
LEAST_S = 0.5  # whoever may wait less does not make it shorter: it would run empty now and then


class Pressure:
    """One thread's. The clock is the caller's."""

    def __init__(self) -> None:
        self._refusals: dict[int, tuple[float, float]] = {}  # by priority: limit, until when

    def limit_s(self, now: float, priority: int = 0) -> float:
        """inf: nobody as urgent was refused lately."""
        if not self._refusals:
            return math.inf
        limits = (
            limit_s
            for refused, (limit_s, until) in self._refusals.items()
            if refused >= priority and now < until
        )
        return min(limits, default=math.inf)

    def refused(self, may_wait_s: float, now: float, priority: int = 0) -> None:
        """Where a request that might have waited so long found no place."""
        may_wait_s = max(may_wait_s, LEAST_S)
        if may_wait_s <= self.limit_s(now, priority):
            self._refusals[priority] = may_wait_s, now + LASTING_S
