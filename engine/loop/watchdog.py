"""The watchdog: detects a stalled engine.

It runs on its own thread, since the engine thread may be stuck. While there is work, steps must
finish. Otherwise the loop must turn.
"""

import threading
import time
from collections.abc import Callable

from common.process.standstill import StallMonitor
from engine.loop.clock import StepClock

_LOOKS = 8  # checks per limit


class Watchdog:
    """A watchdog that reports each stall once.

    Args:
        has_work: returns whether there is work for which a step should finish. Called on any
            thread.
        on_stuck: called with the seconds of the stall, on the watchdog's thread.
    """

    def __init__(
        self,
        clock: StepClock,
        *,
        limit_s: float,
        has_work: Callable[[], bool],
        on_stuck: Callable[[float], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._has_work = has_work
        self._on_stuck = on_stuck
        self._look_s = limit_s / _LOOKS
        self._standstill = StallMonitor(self._look_s, now)
        self._seen = (False, -1)
        self._told = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def look(self) -> None:
        """Check once. `start` calls this several times per limit."""
        reading = self._clock.reading
        working = reading.started_at is not None or self._has_work()
        seen = (working, reading.finished if working else reading.turns)
        if seen != self._seen:
            self._seen = seen
            self._standstill.moved()
            self._told = False
            return
        still_s = self._standstill.look()
        if still_s > self._limit_s and not self._told:
            self._told = True
            self._on_stuck(still_s)

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_s):
            self.look()
