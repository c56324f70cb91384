"""The watchdog: says so when work waits and no step is finished for too long.

It looks from a thread of its own, since the engine thread may be the one that is stuck.
"""

import threading
import time
from collections.abc import Callable, Mapping

from common.engine.loop.clock import StepClock


class Watchdog:
    """Reports each standstill once.

    Args:
        has_work: is there anything that a step could be finished for? Asked on any thread.
        dump: the state to report. Asked on the watchdog's thread, about a loop that stands still.
        on_stuck: gets the seconds of standstill and the dump, on the watchdog's thread.
    """

    def __init__(
        self,
        clock: StepClock,
        *,
        limit_s: float,
        has_work: Callable[[], bool],
        dump: Callable[[], Mapping[str, object]],
        on_stuck: Callable[[float, Mapping[str, object]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._has_work = has_work
        self._dump = dump
        self._on_stuck = on_stuck
        self._now = now
        self._finished = -1
        self._moved_at = now()
        self._reported = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def look(self) -> None:
        """Looks once. `start` does it several times per limit."""
        now, reading = self._now(), self._clock.reading
        working = reading.started_at is not None or self._has_work()
        if reading.finished != self._finished or not working:
            self._finished = reading.finished
            self._moved_at = now
            self._reported = False
        elif now - self._moved_at > self._limit_s and not self._reported:
            self._reported = True
            self._on_stuck(now - self._moved_at, self._dump())

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit_s / 8):
            self.look()
