"""Metrics of steps and of kernel compilations.

The warmup compiles the known kernels. A missing kernel makes a step take seconds longer
(`Compiles`).

`StepMeter` counts decode steps in groups, because counting each would cost about 3 % of a small
batch's step.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram
from common.logs import kv
from engine.batch.batch import ForwardMode

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
