"""How long work takes: on a GPU by CUDA events around it, elsewhere by the host's clock."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Work: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median of `runs`, and where the middle three fifths of them lie."""

    p50: float
    p20: float
    p80: float
    runs: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
        return cls(statistics.median(seconds), fifths[0], fifths[3], len(seconds))


class Clock(Protocol):
    """Work must have been done once before it is timed: nothing is compiled under the clock."""

    def time(self, work: Work, *, prepare: Work | None = None, cold: bool = True) -> Timing:
        """
        Args:
            prepare: done before each run, outside its time.
            cold: what the work reads is not in the cache.
        """
        ...

    def stamp(self) -> Any:
        """A point on the current stream, behind all that was enqueued there."""
        ...

    def between(self, one: Any, other: Any) -> float:
        """Seconds between two stamps that the device has passed."""
        ...


class CudaClock:
    """Each run waits behind other work of the GPU, until the host has enqueued all of it: launches
    are not part of a time, unless one run needs the host for longer than HOLD_S."""

    HOLD_S = 150e-6

    def __init__(self, device: torch.device, target_s: float = 0.1) -> None:
        """target_s: spent on the runs of one timing, if they are neither too few nor too many."""
        self._device = device
        self._target_s = target_s
        self._hold_cycles = int(self.HOLD_S * 1.8e9)

    @functools.cached_property
    def _flush(self) -> Tensor:
        """Written between runs: nothing that was in the cache before is left."""
        size = torch.cuda.get_device_properties(self._device).L2_cache_size
        return torch.empty(4 * size, dtype=torch.uint8, device=self._device)

    def time(self, work: Work, *, prepare: Work | None = None, cold: bool = True) -> Timing:
        (first,) = self._run(1, work, prepare, cold)
        runs = int(min(100, max(3, self._target_s / max(first, 1e-6))))
        return Timing.of(self._run(runs, work, prepare, cold))

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, one: Any, other: Any) -> float:
        return float(one.elapsed_time(other)) * 1e-3

    def _run(self, runs: int, work: Work, prepare: Work | None, cold: bool) -> list[float]:
        stamps = []
        for _ in range(runs):
            if prepare is not None:
                prepare()
            if cold:
                self._flush.zero_()
            torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]
            began = self.stamp()
            work()
            stamps.append((began, self.stamp()))
        torch.cuda.synchronize()
        return [self.between(began, ended) for began, ended in stamps]


class HostClock:
    """For the dry mode: one run, whose time says nothing."""

    def time(self, work: Work, *, prepare: Work | None = None, cold: bool = True) -> Timing:
        if prepare is not None:
            prepare()
        started = time.perf_counter()
        work()
        return Timing.of([time.perf_counter() - started])

    def stamp(self) -> Any:
        return time.perf_counter()

    def between(self, one: Any, other: Any) -> float:
        return float(other - one)
