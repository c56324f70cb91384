"""The setting of every part of tools/bench/gpu: device, clock, and ceilings of the machine.

The dry mode runs the same code on a CPU: small sizes, float32, and kernels in Triton's interpreter
(which computes bfloat16 wrongly). Its times are meaningless.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels import device as kernel_device
from tools.bench.gpu.clock import Clock, CudaClock, HostClock

Sized = TypeVar("Sized")
UNITS = {"copy": "GB/s", "read": "GB/s", "matmul": "TFLOP/s"}
_SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits, measured in the same run: the denominators of all shares.

    copy: bytes/s of a copy on the device, counting reads and writes. read: bytes/s of reading only.
    matmul: FLOP/s of a large product of random numbers in the model's dtype.
    """

    copy: float
    read: float
    matmul: float

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> "Ceilings":
        """Return the highest measured rate of each kind from the rows of the part `machine`."""
        best = dict.fromkeys(UNITS, 0.0)
        for row in rows:
            if (name := row.get("ceiling")) is not None:
                best[name] = max(best[name], row["rate"] * _SCALES[row["unit"]])
        return cls(**best)

    def of_kind(self, name: str) -> float:
        return float(getattr(self, name))


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """The setting of one process. dtype: dtype of weights, activations and KV."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    ceilings: Ceilings
    dry: bool

    @classmethod
    def make(cls, ceilings: Ceilings, *, dry: bool) -> "Setting":
        """Make a setting without using the device.

        A process that has used it must not be forked.
        """
        torch.manual_seed(0)
        if dry:
            torch.set_num_threads(1)
            return cls(torch.device("cpu"), torch.float32, HostClock(), ceilings, dry)
        device = torch.device("cuda:0")
        return cls(device, torch.bfloat16, CudaClock(device), ceilings, dry)

    def sized(self, full: Sized, dry: Sized) -> Sized:
        """Return a size, or a list of sizes: `full`, or `dry` in the dry mode."""
        return dry if self.dry else full

    def share(self, ceiling: str, amount: float, seconds: float) -> float:
        """Return the share of a ceiling that `amount` bytes or FLOPs in `seconds` reach."""
        return amount / seconds / self.ceilings.of_kind(ceiling)

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


def rate(ceiling: str, amount: float, seconds: float) -> dict[str, Any]:
    """Return the rate as fields of a row."""
    unit = UNITS[ceiling]
    return {"rate": amount / seconds / _SCALES[unit], "unit": unit}
