"""Launches steps and copies that take the modelled time. Steps write witnesses instead of KV."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.distribution import HistogramCounts
from common.logs import ThrottledLog
from engine.batch.batch import BatchResult, Ints, PageCopies, ScheduleBatch
from simulation.cost import StepCost, StepShape
from simulation.device.sim_device import SimDevice
from simulation.device.witness import Words, torn

_LONG_LAG_S = 0.1  # a longer lag is logged
_MOST_LAG_S = 1.0
_CATCHING_UP = 0.96  # shortest step of a node that lags, as a share of its modelled duration
_log = ThrottledLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True, eq=False)
class SimStep:
    """A launched step.

    Attributes:
        done_at: end of the step by the node's own time.
        seconds: duration by the cost model.
        result: executes the step and returns its result.
    """

    batch: ScheduleBatch
    done_at: float
    seconds: float
    result: Callable[[], BatchResult]

    def sample(self) -> None:
        """Do nothing: the device finds the newest tokens on its own."""


class SimRunner:
    """Launches the steps of an engine on a simulated device, one after the other.

    A step begins at the node's own time, which is the time of the event that the engine handles, so
    delays of a busy host do not add up. A node that lags shortens its steps a little until it has
    caught up. Lag beyond a second is lost.

    Args:
        page_bytes: bytes of a real page, which determine the time of copies.

    Attributes:
        now: the node's own time, on the clock of time.monotonic(). Set by the driver of the loop.
        busy_s: duration of all launched steps.
        slowness: factor of step durations, for tests of failures.
    """

    def __init__(self, device: SimDevice, cost: StepCost, page_bytes: int) -> None:
        self._device = device
        self._page_bytes = page_bytes
        self._cost = cost
        self._free_at = 0.0  # end of the last launched step
        self._lag_s = 0.0  # longest lag since the last report
        self._reached_at = 0.0  # time.monotonic() when the driver reached the last step
        self.now = time.monotonic()
        self.busy_s = 0.0
        self.slowness = 1.0

    def due(self, step: SimStep) -> float:
        """Return the time.monotonic() until which the driver must wait for a step."""
        return max(step.done_at, self._reached_at + _CATCHING_UP * step.seconds)

    def reached(self, step: SimStep) -> None:
        """Record that the driver has waited for a step."""
        now = self._reached_at = time.monotonic()
        self.now = max(step.done_at, now - _MOST_LAG_S)
        lag_s = now - step.done_at
        self._lag_s = max(self._lag_s, lag_s)
        if lag_s > _LONG_LAG_S:
            _log.warning("simulated node is late because this host is busy", seconds=lag_s)

    def gauges(self) -> Mapping[str, float]:
        """Return the metrics of a simulated device, see MetricSource."""
        lag_s, self._lag_s = self._lag_s, 0.0
        return {"simulated": 1.0, "simulation_lag": lag_s}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def launch(self, batch: ScheduleBatch) -> SimStep:
        rows = self._device.rows_of(batch)
        seconds = self._cost.step_s(_shape(batch)) if len(batch.slots) else 0.0
        for copies in (batch.swap_out, batch.swap_in):
            if copies is not None:
                seconds += self._cost.host_copy_s(len(copies.host_pages) * self._page_bytes)
        seconds *= self.slowness
        self._free_at = max(self._free_at, self.now) + seconds
        self.busy_s += seconds
        return SimStep(batch, self._free_at, seconds, lambda: self._device.compute(batch, rows))


def _shape(batch: ScheduleBatch) -> StepShape:
    counts: Any = batch.ends - batch.starts
    return StepShape(tuple(counts.tolist()), tuple(batch.ends.tolist()))


class SimCopier:
    """Copies pages, see TierCopier. A page is torn if it changes while it is copied.

    Attributes:
        notify: called when a copy is done.

    Args:
        page_bytes: bytes of a real page, which determine the time of copies.
    """

    def __init__(self, pool: Words, host_pool: Words, cost: StepCost, page_bytes: int) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._pool, self._host_pool = pool, host_pool
        self._out, self._in = (_Direction(cost, page_bytes, lambda: self.notify()) for _ in "oi")

    def save(self, copies: PageCopies) -> Future[None]:
        return self._out.submit(self._pool, copies.device_pages, self._host_pool, copies.host_pages)

    def load(self, copies: PageCopies) -> Future[None]:
        return self._in.submit(self._host_pool, copies.host_pages, self._pool, copies.device_pages)

    def close(self) -> None:
        """Cancel all copies."""
        for direction in (self._out, self._in):
            direction.close()


class _Direction:
    """Copies in one direction, one after the other."""

    def __init__(self, cost: StepCost, page_bytes: int, notify: Callable[[], None]) -> None:
        self._cost = cost
        self._page_bytes = page_bytes
        self._notify = notify
        self._waiting: deque[Callable[[], None]] = deque()  # starts of later copies
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, source: Words, pages: Ints, target: Words, target_pages: Ints) -> Future[None]:
        copy: Future[None] = Future()

        def begin() -> None:
            before = source[pages]

            def end() -> None:
                target[target_pages] = torn(before, source[pages])
                copy.set_result(None)
                self._timer = None
                self._begin()
                self._notify()

            seconds = self._cost.host_copy_s(len(pages) * self._page_bytes)
            self._timer = asyncio.get_running_loop().call_later(seconds, end)

        self._waiting.append(begin)
        self._begin()
        return copy

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        if self._timer is None and self._waiting:
            self._waiting.popleft()()
