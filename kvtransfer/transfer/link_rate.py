"""How fast a link is, by all that is known of it: probes, and reads of requests' pages."""

from collections import deque

GIB = 1 << 30
LEAST_BYTES = 1 << 20  # a shorter read shows the round trip rather than the rate
WINDOW = 8  # measurements that count
FIRST_PROBE_S = 10.0  # without a measurement, until an idle link is probed again
MOST_PROBE_S = 300.0  # this time doubles with each probe up to here
NEWS = 1.25  # factor between two rates that are reported


class LinkRate:
    """The best of the last measurements: other work on the two hosts makes reads slower, and never
    faster than the link."""

    def __init__(self, gib_per_s: float, now: float) -> None:
        """
        Args:
            gib_per_s: as the first probe measured it.
        """
        self._measured = deque([gib_per_s], maxlen=WINDOW)
        self._reported = gib_per_s
        self._interval_s = FIRST_PROBE_S
        self._measured_at = now

    @property
    def gib_per_s(self) -> float:
        return max(self._measured)

    @property
    def probe_at(self) -> float:
        """When to probe the link, if it is idle then."""
        return self._measured_at + self._interval_s

    def probed(self, gib_per_s: float, now: float) -> None:
        self._interval_s = min(2.0 * self._interval_s, MOST_PROBE_S)
        self._add(gib_per_s, now)
        self._reported = self.gib_per_s

    def read(self, num_bytes: int, seconds: float, now: float) -> bool:
        """Take a read into account. Return whether the rate is to be reported."""
        if num_bytes < LEAST_BYTES or seconds <= 0.0:
            return False
        self._add(num_bytes / GIB / seconds, now)
        if self._reported / NEWS < self.gib_per_s < self._reported * NEWS:
            return False
        self._reported = self.gib_per_s
        return True

    def _add(self, gib_per_s: float, now: float) -> None:
        self._measured.append(gib_per_s)
        self._measured_at = now
