"""Timing of work: on a GPU by CUDA events, elsewhere by the host's clock."""

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
    """A timing in seconds: the median of `runs`, and the range of the middle three fifths."""

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
    """A clock for work on a device.

    The caller must run the work once before, so that no compilation is timed.
    """

    def time(self, work: Work, *, prepare: Work | None = None, cold: bool = True) -> Timing:
        """Time the work.

        Args:
            prepare: runs before each run, outside its time.
            cold: flush the cache before each run.
        """
        ...

    def stamp(self) -> Any:
        """Return a stamp on the current stream, after all work enqueued so far."""
        ...

    def between(self, one: Any, other: Any) -> float:
        """Return the seconds between two stamps that the device has passed."""
        ...


class CudaClock:
    """A clock that excludes launch times.

    Each run waits behind other GPU work until the host has enqueued all of it. This fails only if
    the host needs longer than HOLD_S for one run.

    Args:
        target_s: seconds for all runs of one timing.
    """

    HOLD_S = 150e-6

    def __init__(self, device: torch.device, target_s: float = 0.1) -> None:
        self._device = device
        self._target_s = target_s
        self._hold_cycles = int(self.HOLD_S * 1.8e9)

    @functools.cached_property
    def _flush(self) -> Tensor:
        """Return the buffer that is overwritten between runs, to evict the cache."""
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
    """A clock for the dry mode: one run, whose time is meaningless."""

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
