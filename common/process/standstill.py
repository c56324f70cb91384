"""How long nothing has moved, as far as an onlooker can say who looks again and again.

Time in which the onlooker itself stood still (a stopped process, a host asleep) is no evidence: the
signs of life of that time may be waiting for it. Knows nothing of what it is that moves.
"""

import time
from collections.abc import Callable


class Standstill:
    """One thread's, or one event loop's."""

    def __init__(self, look_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            look_s: between two looks; of a longer pause twice as much counts.
        """
        self._most_s = 2.0 * look_s
        self._now = now
        self._looked_at = now()
        self._still_s = 0.0

    def moved(self, ago_s: float = 0.0) -> None:
        """A sign of life, just now or `ago_s` seconds ago."""
        self._looked_at = self._now()
        self._still_s = ago_s

    def look(self) -> float:
        """Seconds of standstill that have been seen."""
        now = self._now()
        self._still_s += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._still_s
