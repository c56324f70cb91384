"""Unpacked matrices, multiplied as they are stored. For every device and dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.experts import StackedLinear, stack
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, StoredExperts
from kernels.experts.grouped_mlp import Gate
from kernels.layers.linear import linear
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """An unpacked matrix.

    Attributes:
        weight: [out, in].
    """

    weight: Tensor
    bias: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DenseForm(Form):
    """A form that holds matrices unpacked, in `dtype` on `device`."""

    device: torch.device
    dtype: torch.dtype

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> DenseLinear:
        own = matrix.floats().to(device=self.device, dtype=self.dtype, copy=True)
        return DenseLinear(own, bias)

    def tied(self, embedding: Tensor) -> DenseLinear:
        return DenseLinear(embedding)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> StackedLinear:
        return stack(stored, count, gate, self.device, self.dtype)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return rows * columns * self.dtype.itemsize

    def tied_bytes(self, rows: int, columns: int) -> int:
        return 0
