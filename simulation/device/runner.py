"""Launches of steps that take the modelled time and write witnesses in place of KV."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.distribution import HistogramCounts
from common.logs import Throttle, ThrottledLog
from engine.batch.batch import NOT_SAMPLED, BatchResult, Ints, ScheduleBatch
from engine.batch.table import SlotTable
from simulation.cost import StepCost, StepShape
from simulation.device.witness import Words, place_weights, token_weights, tokens_of

_LONG_LAG_S = 0.1  # is logged
_MOST_LAG_S = 1.0
_CATCHING_UP = 0.96  # shortest duration of a step of a node that is late, as a share
_log = ThrottledLog(logging.getLogger(__name__), Throttle())
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step, copied at the launch.

    Attributes:
        rows, places: row and index in the request of each computed token.
        tokens: of these tokens, as far as they are known.
        unknown: the token is the last one that was sampled in its slot.
        pages: [rows, most pages of a row].
        num_pages: by row.
    """

    slots: NDArray[np.intp]
    rows: NDArray[np.intp]
    places: NDArray[np.intp]
    tokens: Ints
    unknown: NDArray[np.bool_]
    pages: Ints
    num_pages: NDArray[np.intp]


class SimDevice:
    """The memory of a simulated device, and what it keeps of each slot.

    Args:
        pool, host_pool: witnesses of all pages.
    """

    def __init__(self, table: SlotTable, pool: Words, host_pool: Words) -> None:
        self._table = table
        self._pool = pool
        self._host_pool = host_pool
        self._newest = np.zeros(table.num_slots, np.int32)  # the last token sampled in each slot
        self._token_weights = token_weights(table.page_size)
        self._place_weights = place_weights(table.page_table.shape[2])

    def rows_of(self, batch: ScheduleBatch) -> _Rows:
        """Copy what a step needs of the table."""
        table = self._table
        slots, counts = batch.slots.astype(np.intp), (batch.ends - batch.starts).astype(np.intp)
        rows = np.repeat(np.arange(len(slots)), counts)
        firsts = np.cumsum(counts) - counts
        places = np.arange(len(rows)) - (firsts - batch.starts)[rows]
        num_pages = -(-batch.ends.astype(np.intp) // table.page_size)
        return _Rows(
            slots,
            rows,
            places,
            table.tokens[slots[rows], places],
            places >= table.known[slots[rows]],
            table.by_table[0][slots, : num_pages.max(initial=0)],
            num_pages,
        )

    def compute(self, batch: ScheduleBatch, step: _Rows) -> Ints:
        """Carry out a step, in the order of launches. Returns its tokens, see BatchResult."""
        self._copy(batch)
        if not len(step.slots):
            return np.empty(0, np.int32)
        tokens = np.where(step.unknown, self._newest[step.slots[step.rows]], step.tokens)
        numbers, indices = np.divmod(step.places, self._table.page_size)
        pages = step.pages[step.rows, numbers]
        self._pool[pages[indices == 0]] = _ZERO
        parts = (tokens.astype(np.uint64) + _ONE) * self._token_weights[indices]
        np.add.at(self._pool, pages, parts)
        sampled = np.where(batch.samples, tokens_of(self._totals(step)), NOT_SAMPLED)
        self._newest[step.slots[batch.samples]] = sampled[batch.samples]
        return sampled.astype(np.int32)

    def _totals(self, step: _Rows) -> Words:
        """Return the total of each row, from the witnesses of all its pages."""
        width = step.pages.shape[1]
        has = np.arange(width) < step.num_pages[:, None]
        witnesses = np.where(has, self._pool[step.pages], _ZERO)
        totals: Words = (witnesses * self._place_weights[:width]).sum(axis=1, dtype=np.uint64)
        return totals

    def _copy(self, batch: ScheduleBatch) -> None:
        if (out := batch.swap_out) is not None:
            self._host_pool[out.host_pages] = self._pool[out.device_pages]
        if (back := batch.swap_in) is not None:
            self._pool[back.device_pages] = self._host_pool[back.host_pages]


@dataclass(frozen=True, slots=True, eq=False)
class SimStep:
    """A launched step.

    Attributes:
        done_at: end by the node's own time.
        seconds: duration by the cost model.
    """

    batch: ScheduleBatch
    done_at: float
    seconds: float
    finish: Callable[[], Ints]

    def sample(self) -> None:
        """Do nothing: a device finds the newest tokens by itself."""

    def result(self) -> BatchResult:
        return BatchResult(self.finish())


class SimRunner:
    """Launches the steps of an engine on a simulated device, one after the other.

    A step begins at the node's own time, which is that of the event which the engine handles. So
    the delays of a busy host do not add up. A node that is late makes its steps a little shorter
    until it has caught up. Time beyond a lag of a second is lost.

    Attributes:
        now: the node's own time, on the clock of time.monotonic(). Set by the driver of the loop.
        busy_s: duration of all launched steps.
        slowness: factor of the duration of steps, for tests of failures.
    """

    def __init__(self, device: SimDevice, cost: StepCost) -> None:
        self._device = device
        self._cost = cost
        self._free_at = 0.0  # end of the last launched step
        self._lag_s = 0.0  # the longest since the last report
        self._reached_at = 0.0  # time.monotonic() when the last step was reached
        self.now = time.monotonic()
        self.busy_s = 0.0
        self.slowness = 1.0

    def due(self, step: SimStep) -> float:
        """Return the time.monotonic() until which the driver waits for a step."""
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
        seconds *= self.slowness
        self._free_at = max(self._free_at, self.now) + seconds
        self.busy_s += seconds
        return SimStep(batch, self._free_at, seconds, lambda: self._device.compute(batch, rows))


def _shape(batch: ScheduleBatch) -> StepShape:
    counts: Any = batch.ends - batch.starts
    return StepShape(tuple(counts.tolist()), tuple(batch.ends.tolist()))
