"""Measurement of the engine's lateness from another thread."""

import time
from collections.abc import Callable

from common.process.standstill import StallMonitor
from engine.loop.clock import StepClock


class Lateness:
    """A lateness meter for one thread, which calls `look` at least every `look_s` seconds.

    Time in which that thread itself was suspended is not counted, because the engine was probably
    suspended too.
    """

    def __init__(
        self, clock: StepClock, look_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._now = now
        self._standstill = StallMonitor(look_s, now)

    def look(self) -> float:
        """Return the seconds without progress beyond what the current step may take."""
        late_s = self._clock.reading.late_s(self._now())
        if late_s == 0.0:
            self._standstill.moved()
        return min(late_s, self._standstill.look())
