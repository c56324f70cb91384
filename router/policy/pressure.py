"""How long anybody may wait while others are refused who can wait less.

Whoever may wait longest would else fill every queue in a lasting overload: where the impatient find
no place any more, the patient still do. So for a while after one was refused nobody is let in who
would wait longer than that one might have. The queue then is as short as the least patient of those
who ask want it, and all are let in alike: `bench/overload_order.py`.
"""

import math

LASTING_S = 1.0  # after a refusal
LEAST_S = 0.5  # whoever may wait less does not make it shorter: it would run empty now and then


class Pressure:
    """One thread's. The clock is the caller's."""

    def __init__(self) -> None:
        self._limit_s = math.inf
        self._until = -math.inf

    def limit_s(self, now: float) -> float:
        """inf: nobody was refused lately."""
        return self._limit_s if now < self._until else math.inf

    def refused(self, may_wait_s: float, now: float) -> None:
        """Where a request that might have waited so long found no place."""
        may_wait_s = max(may_wait_s, LEAST_S)
        if may_wait_s <= self.limit_s(now):
            self._limit_s, self._until = may_wait_s, now + LASTING_S
