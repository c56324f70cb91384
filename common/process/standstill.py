"""Stall detection by an observer that looks at regular intervals.

Time in which the observer itself was stalled (a stopped process, a suspended host) does not count,
because signs of progress from that time may still be waiting for it.
"""

import time
from collections.abc import Callable


class StallMonitor:
    """Measures time without progress. For one thread or one event loop."""

    def __init__(self, look_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            look_s: seconds between two looks. A longer pause counts as at most twice this.
        """
        self._most_s = 2.0 * look_s
        self._now = now
        self._looked_at = now()
        self._still_s = 0.0

    def moved(self, ago_s: float = 0.0) -> None:
        """Record progress, now or `ago_s` seconds ago."""
        self._looked_at = self._now()
        self._still_s = ago_s

    def look(self) -> float:
        """Return the observed seconds without progress."""
        now = self._now()
        self._still_s += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._still_s
