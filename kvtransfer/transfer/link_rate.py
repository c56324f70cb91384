"""The measured rate of a link, from probes and from reads of requests' pages."""

from collections import deque

GIB = 1 << 30
LEAST_BYTES = 1 << 20  # a shorter read measures the round trip rather than the rate
WINDOW = 8  # number of measurements used
FIRST_PROBE_S = 10.0  # seconds without a measurement until an idle link is probed again
MOST_PROBE_S = 300.0  # upper limit of this time, which doubles with each probe
NEWS = 1.25  # factor between two reported rates


class LinkRate:
    """The best of the last measurements. Other work on the two hosts can make a read slower, but
    never faster than the link.
    """

    def __init__(self, gib_per_s: float, now: float) -> None:
        """
        Args:
            gib_per_s: result of the first probe.
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
        """Return when to probe the link, if it is idle then."""
        return self._measured_at + self._interval_s

    def probed(self, gib_per_s: float, now: float) -> None:
        self._interval_s = min(2.0 * self._interval_s, MOST_PROBE_S)
        self._add(gib_per_s, now)
        self._reported = self.gib_per_s

    def read(self, num_bytes: int, seconds: float, now: float) -> bool:
        """Record a read. Return whether the rate must be reported."""
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
