"""The watchdog: detects a stalled engine, logs its state and exits the process.

It runs on its own thread, since the engine thread may be stuck. While there is work, steps must
finish. Otherwise the loop must turn. The watchdog reads the state itself, because the stalled
engine thread would not respond. The server process then detects the end of the engine process, and
the router replays the node's requests on other nodes.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, Protocol

from common.logs import kv
from common.process.standstill import StallMonitor
from common.requests.timeline import RequestTrace
from engine.loop.step_clock import StepClock

_LOOKS = 8  # checks per limit


class Watchdog:
    """Reports each stall of the engine once.

    Args:
        has_work: returns whether a step should finish. Called on any thread.
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
        self._reported = False
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
            self._reported = False
            return
        still_s = self._standstill.look()
        if still_s > self._limit_s and not self._reported:
            self._reported = True
            self._on_stuck(still_s)

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_s):
            self.look()


log = logging.getLogger(__name__)
NUM_ENDED = 32  # logged requests that recently ended
MAX_LOGGED = 256  # limit of logged requests, including current ones
Fields = Mapping[str, object]  # fields of a log line


class StalledEngine(Protocol):
    """The role of a stalled engine. Called on another thread than the stalled engine thread."""

    def queues(self) -> dict[str, int]:
        """Return the queue lengths of the scheduler and the role, by name."""
        ...

    def handoffs(self) -> Iterable[Fields]:
        """Return the log fields of each open hand-off, such as queue, request and progress."""
        ...

    def flights(self, num_ended: int) -> Iterable[tuple[str, RequestTrace]]:
        """Return request id and events of each current request and of the last `num_ended` ended
        requests."""
        ...


def report_stall(seconds: float, role: StalledEngine) -> None:
    """Log all queues, every open hand-off, the last events of requests, and the stacks of all
    threads."""
    log.error("engine stalled, terminating %s", kv(seconds=seconds, **role.queues()))
    for fields in role.handoffs():
        log.error("open hand-off %s", kv(**fields))
    for request_id, flight in [*role.flights(NUM_ENDED)][-MAX_LOGGED:]:
        events = "; ".join(f"{event.at:.3f} {event.what}" for event in flight.events)
        began_ago_s = flight.began_ago_s
        log.error(
            "running or recent request %s",
            kv(request_id=request_id, began_ago_s=began_ago_s, events=events),
        )
    sys.stderr.flush()
    faulthandler.dump_traceback()


def end_process() -> NoReturn:
    """Exit immediately, without waiting for other threads, which may be stuck in a forward or a
    read."""
    logging.shutdown()
    os._exit(1)
