"""The setting of every part of tools/bench/gpu: device, clock, and ceilings of the machine.

The dry mode runs the same code on a CPU: small sizes, float32, and kernels in Triton's interpreter
(which computes bfloat16 wrongly). Its times are meaningless.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from kernels import device as kernel_device

Sized = TypeVar("Sized")
Work: TypeAlias = Callable[[], object]
_UNITS = {"copy": ("GB/s", 1e9), "read": ("GB/s", 1e9), "matmul": ("TFLOP/s", 1e12)}

# The machine's limits, measured in the same run: the denominators of all shares. copy: bytes/s of a
# copy on the device, counting reads and writes. read: bytes/s of reading only. matmul: FLOP/s of a
# large product of random numbers in the model's dtype.
Ceilings: TypeAlias = Mapping[str, float]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least work of an operation: bytes to copy or to read, or FLOPs of matrix products."""

    ceiling: str  # copy | read | matmul
    amount: float

    def rate(self, seconds: float) -> dict[str, Any]:
        """Return the rate as fields of a row."""
        unit, scale = _UNITS[self.ceiling]
        return {"rate": self.amount / seconds / scale, "unit": unit}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call: the median of `runs`, and the range of the middle three fifths."""

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


class CudaClock:
    """A clock that excludes launch times.

    Each run waits behind other GPU work until the host has enqueued all of it. This fails only if
    the host needs longer than HOLD_S for one run. The caller must run the work once before, so that
    no compilation is timed.
    """

    HOLD_S = 150e-6
    TARGET_S = 0.1  # for all runs of one timing

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hold_cycles = int(self.HOLD_S * 1.8e9)

    @functools.cached_property
    def _flush(self) -> Tensor:
        """Return the buffer that is overwritten between runs, to evict the cache."""
        size = torch.cuda.get_device_properties(self._device).L2_cache_size
        return torch.empty(4 * size, dtype=torch.uint8, device=self._device)

    def time(self, work: Work, *, prepare: Work = nothing, cold: bool = True) -> Timing:
        """Time the work.

        Args:
            prepare: runs before each run, outside its time.
            cold: flush the cache before each run.
        """
        (first,) = self._run(1, work, prepare, cold)
        runs = int(min(100, max(3, self.TARGET_S / max(first, 1e-6))))
        return Timing.of(self._run(runs, work, prepare, cold))

    def stamp(self) -> Any:
        """Return a stamp on the current stream, after all work enqueued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, one: Any, other: Any) -> float:
        """Return the seconds between two stamps that the device has passed."""
        return float(one.elapsed_time(other)) * 1e-3

    def _run(self, runs: int, work: Work, prepare: Work, cold: bool) -> list[float]:
        stamps = []
        for _ in range(runs):
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

    def time(self, work: Work, *, prepare: Work = nothing, cold: bool = True) -> Timing:
        prepare()
        began = self.stamp()
        work()
        return Timing.of([self.between(began, self.stamp())])

    def stamp(self) -> Any:
        return time.perf_counter()

    def between(self, one: Any, other: Any) -> float:
        return float(other - one)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """The setting of one process. dtype: dtype of weights, activations and KV."""

    device: torch.device
    dtype: torch.dtype
    clock: CudaClock | HostClock
    ceilings: Ceilings
    dry: bool

    @classmethod
    def make(cls, ceilings: Ceilings, *, dry: bool) -> "Setting":
        """Make a setting. Does not use the device, because the calling process may fork."""
        torch.manual_seed(0)
        if dry:
            torch.set_num_threads(1)
            return cls(torch.device("cpu"), torch.float32, HostClock(), ceilings, dry)
        device = torch.device("cuda:0")
        return cls(device, torch.bfloat16, CudaClock(device), ceilings, dry)

    def sized(self, full: Sized, dry: Sized) -> Sized:
        """Return a size, or a list of sizes: `full`, or `dry` in the dry mode."""
        return dry if self.dry else full

    def share(self, floor: Floor, seconds: float) -> float:
        """Return the share of its ceiling that work done in `seconds` reaches."""
        return floor.amount / seconds / self.ceilings[floor.ceiling]

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return tensor.normal_(0.0, scale)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return random integers in [0, high)."""
        return torch.randint(0, high, shape, dtype=dtype, device=self.device)

    def launch_kernels(self) -> None:
        """Run the operations of this process as Triton kernels, on a CPU in the interpreter."""
        if self.dry:
            kernel_device.uses_triton = lambda tensor: True

    def finish(self) -> None:
        """Wait until the device has completed all work. Raises errors that occurred there."""
        if not self.dry:
            torch.cuda.synchronize(self.device)
