"""A token bucket per minute: it holds one minute's worth, starts full and refills evenly.

This is the generic cell rate algorithm (ITU-T I.371) in whole numbers, so rounding loses nothing.
Time is counted in steps, `per_minute` steps to a nanosecond. Each item costs 60 * 10**9 steps. The
state is a single number.
"""

import time
from collections.abc import Callable

_MINUTE_NS = 60 * 10**9


class TokenBucket:
    def __init__(self, per_minute: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.per_minute = per_minute
        self._clock_ns = clock_ns
        self._full_at = 0  # time at which the bucket is full, in steps

    def wait_s(self, number: int) -> float:
        """Return the seconds until `number`, at most a minute's worth, can be taken. 0: now."""
        missing = self._lacking() + (number - self.per_minute) * _MINUTE_NS
        return self._seconds(max(missing, 0))

    def take(self, number: int) -> None:
        """Take `number` items even if fewer are available. The excess refills first."""
        self._full_at = self._now() + self._lacking() + number * _MINUTE_NS

    @property
    def remaining(self) -> int:
        """Return the number of items that could be taken now."""
        return max(self.per_minute - -(-self._lacking() // _MINUTE_NS), 0)

    @property
    def full_in_s(self) -> float:
        return self._seconds(self._lacking())

    def _now(self) -> int:
        return self._clock_ns() * self.per_minute

    def _lacking(self) -> int:
        return max(self._full_at - self._now(), 0)

    def _seconds(self, steps: int) -> float:
        return steps / (self.per_minute * 10**9)
