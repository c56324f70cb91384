"""How far the engine is: which step is under way, since when, how long it should take, and whether
the engine makes any progress.

Progress is a turn of the loop, a launch that begins or is done, the end of a step. The engine is
late once it has made none for longer than the step under way may take: five times what such steps
took before, or `first_step_s` while no step of its kind has ended, since kernels may be compiled
then. A kernel that is compiled meanwhile may take `first_step_s`, too, and its end is progress.
With no step under way nothing may take long: the engine is late from its last progress on.

Written by the engine thread, read by any other: one immutable record is replaced at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.loop.compiles import Compiles
from engine.loop.step_meter import StepMeter

_NEWEST_WEIGHT = 0.2  # of a duration in the running average
PATIENCE = 5.0  # times the expected duration


class StepReading(NamedTuple):
    """`started_at` is None between steps, and `step` the last one finished then."""

    step: int
    started_at: float | None  # time.monotonic()
    expected_s: float  # 0.0 where nothing is known yet
    finished: int  # steps finished so far
    turns: int  # of the loop so far
    moved_at: float  # the last progress
    allowed_s: float  # until the next: of the step under way, 0.0 without one

    def late_s(self, now: float) -> float:
        """Return the seconds by which the next progress is overdue."""
        return max(0.0, now - self.moved_at - self.allowed_s)


class _Moved(NamedTuple):
    """The last progress, and what is under way since: what a reading is made of, by whoever wants
    one."""

    at: float
    under_way: ScheduleBatch | None  # the oldest launched
    launching: ScheduleBatch | None
    operates: bool
    started_at: float | None
    step: int
    finished: int
    turns: int


class StepClock:
    """Durations are averaged per token of forwards with prompts, and per step of those without:
    a decode step's time hardly depends on its rows."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        first_step_s: float = 120.0,
    ) -> None:
        """
        Args:
            first_step_s: longest time that a step may take while none of its kind has ended, and
                that an operation or the compilation of a kernel may take.
        """
        self.compiles = Compiles(now)
        self._first_step_s = first_step_s
        self._now = now
        self._launching: ScheduleBatch | None = None
        self._operates = False
        self._launched: deque[ScheduleBatch] = deque()
        self._started_at: float | None = None  # of the oldest launched
        self._step = 0
        self._finished = 0
        self._turns = 0
        self._per_token: float | None = None
        self._per_step: dict[ForwardMode, float | None] = dict.fromkeys(
            (ForwardMode.DECODE, ForwardMode.VERIFY)
        )
        self.meter = StepMeter()
        self._note(now())

    def turned(self) -> None:
        """The loop begins a turn."""
        self._turns += 1
        self._note(self._now())

    def launching(self, batch: ScheduleBatch) -> None:
        """Its launch begins: kernels that it needs may have to be compiled."""
        self._launching = batch
        self._note(self._now())

    def launched(self, batch: ScheduleBatch) -> None:
        now = self._now()
        self._launching = None
        self._launched.append(batch)
        if len(self._launched) == 1:
            self._started_at = now
        self._note(now)

    def finished(self) -> None:
        """The oldest launched step is done; the next one, if any, starts now."""
        batch = self._launched.popleft()
        assert self._started_at is not None
        now = self._now()
        elapsed = now - self._started_at
        if not len(batch.slots):
            pass  # copies say nothing of what a forward takes
        elif batch.mode is ForwardMode.DECODE:
            self._note_step(batch.mode, elapsed)
            self.meter.decoded(len(batch.slots), elapsed)
        else:
            num_tokens = batch.num_tokens
            if batch.mode is ForwardMode.VERIFY:
                self._note_step(batch.mode, elapsed)
            else:
                self._per_token = _average(self._per_token, elapsed / num_tokens)
            self.meter.computed(batch.mode, len(batch.slots), num_tokens, elapsed)
        self._step = batch.step
        self._finished += 1
        self._started_at = now if self._launched else None
        self._note(now)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Allow `first_step_s` for work on the engine thread that is no step."""
        self._operates = True
        self._note(self._now())
        try:
            yield
        finally:
            self._operates = False
            self._note(self._now())

    def _note_step(self, mode: ForwardMode, elapsed: float) -> None:
        self._per_step[mode] = _average(self._per_step[mode], elapsed)

    @property
    def reading(self) -> StepReading:
        """On any thread."""
        moved = self._moved
        allowed_s = self._first_step_s if moved.operates else 0.0
        for batch in (moved.under_way, moved.launching):
            if batch is not None:
                expected_s = self._expected(batch)
                longest_s = self._first_step_s if expected_s is None else PATIENCE * expected_s
                allowed_s = max(allowed_s, longest_s)
        moved_at = max(moved.at, self.compiles.ended_at)
        if (began := self.compiles.began) is not None:
            allowed_s = max(allowed_s, began - moved_at + self._first_step_s)
        under_way = moved.under_way
        return StepReading(
            step=moved.step if under_way is None else under_way.step,
            started_at=moved.started_at,
            expected_s=(self._expected(under_way) or 0.0) if under_way else 0.0,
            finished=moved.finished,
            turns=moved.turns,
            moved_at=moved_at,
            allowed_s=allowed_s,
        )

    def _note(self, now: float) -> None:
        self._moved = _Moved(
            now,
            self._launched[0] if self._launched else None,
            self._launching,
            self._operates,
            self._started_at,
            self._step,
            self._finished,
            self._turns,
        )

    def _expected(self, batch: ScheduleBatch) -> float | None:
        """None: nothing of its kind has been seen."""
        if batch.mode in self._per_step:
            return self._per_step[batch.mode]
        return None if self._per_token is None else self._per_token * batch.num_tokens


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
