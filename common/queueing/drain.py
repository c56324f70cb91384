"""How fast a queue drains, and so how long one waits who comes last.

A queue is whatever waits for one thing: prompts for the forwards that compute them, in tokens,
cached or not; requests for KV pages, in pages. What a unit of it costs is learnt from what has gone
through lately, with all that this took: other rows of a forward, other programs on the machine,
pages that had to be waited for. Only time in which something waited is looked at, so an idle hour
says nothing.

Knows keys and numbers, no requests. The clock is the caller's.
"""

import math
from typing import NamedTuple

from common.errors import QueueTooLong
from common.queueing.waiting_line import Place, WaitingLine

FIRST_SAMPLES = 2  # of a start: what is compiled and allocated then comes once
ENOUGH_SAMPLES = 8  # before these nothing is said
KEPT = 0.97  # of what a sample weighed, with the next one: the last 30 or so decide
PATIENCE = 4.0  # a sample counts for at most so many times what was expected of it,
STALL_S = 1.0  # or so much: a process that stood still for a while is not slow from then on


class Backlog(NamedTuple):
    """What a node says of one of its queues.

    Attributes:
        queued_s: until all that waits now is through.
        unit_s: that each unit takes; 0.0: not known yet, and then nothing waits as far as is known.
    """

    queued_s: float = 0.0
    unit_s: float = 0.0


def may_wait_s(queue_s: float, budget_s: float, work_s: float) -> float:
    """How long a request may wait for its turn.

    Args:
        queue_s: longest wait that was asked for.
        budget_s: until the request must have ended.
        work_s: that it is expected to take then. It is kept free, but for half the budget at most:
            it is an expectation.
    """
    return min(queue_s, budget_s - min(work_s, budget_s / 2))


class Drain:
    """One thread's. Keys are new for everything that joins."""

    def __init__(self) -> None:
        self._line = WaitingLine()  # by key
        self._served = 0  # units since the last sample
        self._since = 0.0  # when the last sample was taken, or the first of them came
        self._num_samples = 0
        self._seconds = 0.0  # weighed sums over samples
        self._units = 0.0

    @property
    def unit_s(self) -> float:
        """Seconds that a unit takes; 0.0: not known yet."""
        return self._seconds / self._units if self._num_samples >= ENOUGH_SAMPLES else 0.0

    @property
    def queued_s(self) -> float:
        return self._line.units * self.unit_s

    @property
    def backlog(self) -> Backlog:
        return Backlog(round(self.queued_s, 4), round(self.unit_s, 9))

    def check(self, newcomer: Place, now: float) -> None:
        """Raises QueueTooLong where it would not be begun in time, or another one not because of
        it. Where nothing waits, or it is not known how long that takes, everything is let in."""
        unit_s = self.unit_s
        if not self._line or not unit_s:
            return
        late, ahead_s = self._line.late_s(newcomer, begins=now, unit_s=unit_s)
        if late > 0.0:
            raise QueueTooLong(
                f"overloaded: {ahead_s:.2f} s of work are ahead of this request here, "
                f"which is {late:.2f} s too much",
                retry_after_s=late,
            )

    def join(self, key: int, place: Place, now: float) -> None:
        if not self._line:
            self._since = now
        self._line.join(key, place)

    def serve(self, key: int, left: int = 0) -> None:
        """So many of its units are left. Whoever is not in the queue, or further already, is passed
        over: it may be served anew. Who is served in part goes on before all others."""
        units = self._line.units_of(key)
        if left >= units:
            return
        self._served += units - left
        self._line.leave(key)
        if left:
            self._line.join(key, Place(-math.inf, left))

    def leave(self, key: int) -> None:
        """It does not want to be served any more. Harmless where it is not in the queue."""
        self._line.leave(key)

    def tick(self, now: float) -> None:
        """What was served since the last call took until now."""
        if not self._served:
            return
        self._num_samples += 1
        if self._num_samples > FIRST_SAMPLES:
            self._learn(now - self._since)
        self._served, self._since = 0, now

    def _learn(self, seconds: float) -> None:
        if self._num_samples > ENOUGH_SAMPLES:
            seconds = min(seconds, max(PATIENCE * self._served * self.unit_s, STALL_S))
        self._seconds = KEPT * self._seconds + seconds
        self._units = KEPT * self._units + self._served
