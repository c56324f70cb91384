"""How far the engine is: which step is under way, since when, and how long it should take.

Written by the engine thread, read by any other: one immutable reading is replaced at a time.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.engine.loop.step_meter import StepMeter
from common.engine.rows.batch import ForwardMode, ScheduleBatch

_NEWEST_WEIGHT = 0.2  # of a duration in the running average


SHORTEST_PATIENCE_S = 10.0
PATIENCE = 5.0  # times the expected duration


class StepReading(NamedTuple):
    """`started_at` is None between steps, and `step` the last one finished then."""

    step: int
    started_at: float | None  # time.monotonic()
    expected_s: float  # 0.0 where nothing is known yet
    finished: int  # steps finished so far

    def is_moving(self, now: float) -> bool:
        """Is the step under way within its time? A peer is told that this node lives only then."""
        if self.started_at is None:
            return True
        return now - self.started_at < max(SHORTEST_PATIENCE_S, PATIENCE * self.expected_s)


class StepClock:
    """Durations are averaged per token of forwards with prompts, and per step of pure decodes:
    a decode step's time hardly depends on its rows."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._launched: deque[ScheduleBatch] = deque()
        self._per_token: float | None = None
        self._per_decode: float | None = None
        self.reading = StepReading(0, None, 0.0, 0)
        self.meter = StepMeter()

    def launched(self, batch: ScheduleBatch) -> None:
        self._launched.append(batch)
        if len(self._launched) == 1:
            self._start(self.reading.finished, self._now())

    def finished(self) -> None:
        """The oldest launched step is done; the next one, if any, starts now."""
        batch = self._launched.popleft()
        reading = self.reading
        assert reading.started_at is not None
        now = self._now()
        elapsed = now - reading.started_at
        if batch.mode is ForwardMode.DECODE:
            self._per_decode = _average(self._per_decode, elapsed)
            self.meter.decoded(len(batch.slots), elapsed)
        else:
            num_tokens = batch.num_tokens
            self._per_token = _average(self._per_token, elapsed / num_tokens)
            self.meter.prefilled(batch.mode, len(batch.slots), num_tokens, elapsed)
        if self._launched:
            self._start(reading.finished + 1, now)
        else:
            self.reading = StepReading(batch.step, None, 0.0, reading.finished + 1)

    def _start(self, finished: int, now: float) -> None:
        batch = self._launched[0]
        if batch.mode is ForwardMode.DECODE:
            expected = self._per_decode or 0.0
        else:
            expected = (self._per_token or 0.0) * batch.num_tokens
        self.reading = StepReading(batch.step, now, expected, finished)


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
