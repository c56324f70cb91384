"""Matrices as they are, multiplied by torch: every device and dtype."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def float(self) -> "Dense":
        """The same numbers in float32."""
        return Dense(self.weight.float(), None if self.bias is None else self.bias.float())


@dataclass(frozen=True, slots=True)
class DenseForm:
    """In `dtype` on `device`."""

    device: torch.device
    dtype: torch.dtype

    def hold(self, stored: Tensor, bias: Tensor | None) -> Dense:
        own = stored.to(device=self.device, dtype=self.dtype, copy=True)
        return Dense(own, bias)

    def tied(self, embedding: Tensor) -> Dense:
        return Dense(embedding)

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.dtype.itemsize

    def tied_bytes(self, rows: int, columns: int) -> int:
        return 0
