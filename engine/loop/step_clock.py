"""Progress of the engine loop, its lateness, and the metrics of its steps.

StepClock measures progress: a turn of the loop, the beginning or end of a launch, or the end of a
step. The engine is late if it makes no progress for longer than the current step may take. The
limit is five times the average duration of such steps. Until a step of its kind has ended, it is
`first_step_s`, since kernels may be compiled then. A kernel compilation may also take
`first_step_s`, and its end is progress. Without a current step the limit is 0. The engine thread
writes the clock by replacing one immutable record, so that any other thread may read it.

The warmup compiles the known kernels. A missing kernel makes a step take seconds longer
(`Compiles`).

`StepMeter` counts decode steps in groups, because counting each would cost about 3 % of a small
batch's step.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram
from common.logs import kv
from common.process.standstill import StallMonitor
from engine.batch.batch import ForwardMode, ScheduleBatch

log = logging.getLogger(__name__)
_WORTH_A_WARNING_S = 1.0  # reading a kernel from Triton's cache takes milliseconds


class Compiles:
    """Counts kernel compilations. The compiling thread writes, any other thread may read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way: dict[int, float] = {}  # start time by thread
        self._num_ended = 0
        self._seconds = 0.0
        self.ended_at = float("-inf")  # time when the last compilation ended

    @property
    def began(self) -> float | None:
        """Start time of the oldest compilation in progress, or None."""
        return min(tuple(self._under_way.values()), default=None)

    def watch(self, runtime: Any) -> None:
        """Make Triton report compilations here from now on.

        Args:
            runtime: `triton.knobs.runtime`.
        """
        runtime.jit_cache_hook = self._begin
        runtime.jit_post_compile_hook = self._end

    def gauges(self) -> Mapping[str, float]:
        return {
            "total_kernels_compiled": float(self._num_ended),
            "total_kernel_compile_seconds": self._seconds,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def _begin(self, **_: Any) -> bool:
        """Record a start. Return False, so that Triton compiles."""
        self._under_way[threading.get_ident()] = self._now()
        return False

    def _end(self, *, fn: Any, **_: Any) -> None:
        now = self._now()
        seconds = now - self._under_way.pop(threading.get_ident(), now)
        self._num_ended += 1
        self._seconds += seconds
        self.ended_at = now
        if seconds >= _WORTH_A_WARNING_S:
            log.warning("kernel compiled while serving %s", kv(kernel=fn.name, seconds=seconds))


_UNCOUNTED = 256  # maximum number of steps per group
_MEASURED = (
    ForwardMode.EXTEND,
    ForwardMode.DECODE,
    ForwardMode.MIXED,
    ForwardMode.VERIFY,
    ForwardMode.SPLIT,
)


class _Mode:
    """The metrics of steps with one forward mode."""

    __slots__ = ("requests", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = LiveHistogram(distribution.STEP_S)
        self.requests = LiveHistogram(distribution.BATCH_REQUESTS)
        self.tokens = LiveHistogram(distribution.BATCH_TOKENS)


class StepMeter:
    """The metrics of all steps. Engine thread only.

    Attributes:
        waited_s: total time spent waiting for results.
        gap_s: total time before launches while no step was in flight and the loop did not sleep.
    """

    def __init__(self) -> None:
        self._modes = [_Mode() for _ in range(max(ForwardMode) + 1)]  # indexed by mode
        self._decode_requests: list[int] = []  # requests of steps that are not counted yet
        self._decode_seconds: list[float] = []
        self.waited_s = 0.0
        self.gap_s = 0.0

    def decoded(self, num_requests: int, seconds: float) -> None:
        """Record a step of mode DECODE, with one token per request."""
        self._decode_requests.append(num_requests)
        self._decode_seconds.append(seconds)
        if len(self._decode_seconds) >= _UNCOUNTED:
            self._count_decodes()

    def computed(
        self, mode: ForwardMode, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Record a step of another mode, with prompts or with drafts."""
        of_mode = self._modes[mode]
        of_mode.seconds.add(seconds)
        of_mode.requests.add(num_requests)
        of_mode.tokens.add(num_tokens)

    def gauges(self) -> dict[str, float]:
        return {
            "total_waited/device": self.waited_s,
            "total_step_gap_seconds": self.gap_s,
        }

    def distributions(self) -> dict[str, HistogramCounts]:
        self._count_decodes()
        counted: dict[str, HistogramCounts] = {}
        for mode in _MEASURED:
            of_mode, name = self._modes[mode], mode.name.lower()
            counted[f"step_seconds/{name}"] = of_mode.seconds.counted()
            counted[f"batch_requests/{name}"] = of_mode.requests.counted()
            if mode is not ForwardMode.DECODE:
                counted[f"batch_tokens/{name}"] = of_mode.tokens.counted()
        return counted

    def _count_decodes(self) -> None:
        decode = self._modes[ForwardMode.DECODE]
        decode.requests.add_all(self._decode_requests)
        decode.seconds.add_all(self._decode_seconds)
        self._decode_requests.clear()
        self._decode_seconds.clear()


_PROMPTS_ALONE = (ForwardMode.EXTEND, ForwardMode.SPLIT)


class PrefillPace:
    """Device time per token of prompts. Steps are weighted by their tokens, so that overhead of
    short prompts hardly matters."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0  # through all layers

    def took(self, work: float, seconds: float) -> None:
        """Record a step.

        Args:
            work: see ScheduleBatch.
        """
        self._seconds += seconds - _NEWEST_WEIGHT * self._seconds
        self._tokens += work - _NEWEST_WEIGHT * self._tokens

    def token_s(self) -> float | None:
        """Return the seconds per token through all layers. None: no step has ended yet."""
        return self._seconds / self._tokens if self._tokens else None


_NEWEST_WEIGHT = 0.2  # weight of a new duration in the running average
PATIENCE = 5.0  # multiple of the expected duration


class StepReading(NamedTuple):
    """A snapshot of the progress. Between steps, `started_at` is None and `step` is the last
    finished one."""

    step: int
    started_at: float | None  # time.monotonic()
    expected_s: float  # 0.0 if unknown
    finished: int  # finished steps so far
    turns: int  # turns of the loop so far
    moved_at: float  # time of the last progress
    allowed_s: float  # seconds until the next progress is due, 0.0 without a current step

    def late_s(self, now: float) -> float:
        """Return the seconds by which the next progress is overdue."""
        return max(0.0, now - self.moved_at - self.allowed_s)


class _Moved(NamedTuple):
    """The last progress and the current work. Readers compute a StepReading from it.

    Attributes:
        reading: without the times that depend on later compilations and steps.
        under_way: the oldest launched batch.
    """

    reading: StepReading
    under_way: ScheduleBatch | None
    launching: ScheduleBatch | None
    operates: bool


class StepClock:
    """Measures steps and progress. Durations are averaged per token for forwards with prompts, and
    per step for others. The time of a decode step hardly depends on its rows.

    Attributes:
        others_allow_s: longest time that the current step may take on other nodes of a group.
        prefill: device time per token of prompts.

    Args:
        first_step_s: maximum seconds of a step until a step of its kind has ended, of an operation,
            and of a kernel compilation.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        first_step_s: float = 120.0,
    ) -> None:
        self.compiles = Compiles(now)
        self._first_step_s = first_step_s
        self._now = now
        self._launching: ScheduleBatch | None = None
        self._operates = False
        self._launched: deque[ScheduleBatch] = deque()
        self._started_at: float | None = None  # start of the oldest launched step
        self._step = 0
        self._finished = 0
        self._turns = 0
        self._per_token: float | None = None
        self._per_step: dict[ForwardMode, float | None] = {
            ForwardMode.DECODE: None,
            ForwardMode.VERIFY: None,
            ForwardMode.IDLE: 0.0,
        }
        self.others_allow_s = 0.0
        self.prefill = PrefillPace()
        self.meter = StepMeter()
        self._free_at = now()  # when the last step or sleep ended
        self._note(self._free_at)

    def turned(self) -> None:
        """Record that the loop begins a turn."""
        self._turns += 1
        self._note(self._now())

    def launching(self, batch: ScheduleBatch) -> None:
        """Record that a launch begins. It may have to compile kernels."""
        self._launching = batch
        self._note(self._now())

    def launched(self, batch: ScheduleBatch) -> None:
        now = self._now()
        self._launching = None
        self._launched.append(batch)
        if len(self._launched) == 1:
            self._started_at = now
            self.meter.gap_s += now - self._free_at
        self._note(now)

    def rested(self) -> None:
        """Record the end of a sleep. The time before it does not count as a gap."""
        self._free_at = self._now()

    def finished(self) -> None:
        """Record that the oldest launched step is finished. The next one, if any, starts now."""
        batch = self._launched.popleft()
        assert self._started_at is not None
        now = self._now()
        elapsed = now - self._started_at
        if not len(batch.slots):
            pass  # copies do not show the duration of a forward
        elif batch.mode is ForwardMode.DECODE:
            self._note_step(batch.mode, elapsed)
            self.meter.decoded(len(batch.slots), elapsed)
        elif work := batch.work:  # 0 if the step drops a forward
            if batch.mode is ForwardMode.VERIFY:
                self._note_step(batch.mode, elapsed)
            else:
                self._per_token = _average(self._per_token, elapsed / work)
            if batch.mode in _PROMPTS_ALONE:
                self.prefill.took(work, elapsed)
            self.meter.computed(batch.mode, len(batch.slots), batch.num_tokens, elapsed)
        self._step = batch.step
        self._finished += 1
        self._started_at = now if self._launched else None
        self._free_at = now
        self._note(now)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Allow `first_step_s` for work on the engine thread that is not a step."""
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
        """The current progress. Safe on any thread."""
        reading, under_way, launching, operates = self._moved
        allowed_s = self._first_step_s if operates else 0.0
        for batch in (under_way, launching):
            if batch is not None:
                allowed_s = max(allowed_s, self.allowed_s(batch), self.others_allow_s)
        moved_at = max(reading.moved_at, self.compiles.ended_at)
        if (began := self.compiles.began) is not None:
            allowed_s = max(allowed_s, began - moved_at + self._first_step_s)
        expected_s = (self._expected(under_way) or 0.0) if under_way else 0.0
        return reading._replace(expected_s=expected_s, moved_at=moved_at, allowed_s=allowed_s)

    def _note(self, now: float) -> None:
        under_way = self._launched[0] if self._launched else None
        step = self._step if under_way is None else under_way.step
        reading = StepReading(step, self._started_at, 0.0, self._finished, self._turns, now, 0.0)
        self._moved = _Moved(reading, under_way, self._launching, self._operates)

    def allowed_s(self, batch: ScheduleBatch) -> float:
        """Return the longest time that a step may take."""
        expected_s = self._expected(batch)
        return self._first_step_s if expected_s is None else PATIENCE * expected_s

    def _expected(self, batch: ScheduleBatch) -> float | None:
        """Return the expected seconds of a step, or None if no step of its kind has ended."""
        if batch.mode in self._per_step:
            return self._per_step[batch.mode]
        return None if self._per_token is None else self._per_token * batch.work


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)


class Lateness:
    """Measures for one thread how late the engine is. The thread calls `look` at least every
    `look_s` seconds.

    Time in which this thread itself was suspended does not count, because the engine was probably
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
