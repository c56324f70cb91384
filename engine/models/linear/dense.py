"""Matrices multiplied as they are stored.

Floats are for every device and dtype. Quantised matrices are for GPUs, and are converted to floats
in each product (weight-only quantisation).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.experts import StackedLinear, stack
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.experts.grouped_mlp import Gate
from kernels.layers.linear import linear
from kernels.layers.quantised_linear import quantised_linear
from kernels.quantised import SMALLEST_GROUP, QuantFormat, Quantisation


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


@dataclass(frozen=True, slots=True, eq=False)
class WeightOnlyLinear:
    """A quantised matrix.

    Attributes:
        numbers: [out, in], or [out, in / 2] for 4 bits.
    """

    numbers: Tensor
    quantisation: Quantisation
    bias: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        return quantised_linear(x, self.numbers, self.quantisation, self.bias)


@dataclass(frozen=True, slots=True)
class WeightOnlyForm(Form):
    """A form that keeps quantised matrices as stored, and holds others in `dtype` on `device`.

    A matrix becomes floats if a rank's part has groups that are too small for a product.
    """

    device: torch.device
    dtype: torch.dtype

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        if not _keeps(matrix.format):
            return self._rest.hold(matrix, bias)
        numbers, quantisation = matrix.quantised()
        own = quantisation.with_tensors(self._own)
        return WeightOnlyLinear(self._own(numbers), own, bias)

    def tied(self, embedding: Tensor) -> Linear:
        return self._rest.tied(embedding)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> StackedLinear:
        return stack(stored, count, gate, self.device, self.dtype, _keeps)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        if stored is None or not _keeps(stored):
            return self._rest.num_bytes(rows, columns)
        return stored.num_bytes(rows, columns)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self._rest.tied_bytes(rows, columns)

    @property
    def _rest(self) -> DenseForm:
        return DenseForm(self.device, self.dtype)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, copy=True)


def _keeps(stored: QuantFormat | None) -> bool:
    return stored is not None and stored.group % SMALLEST_GROUP == 0
