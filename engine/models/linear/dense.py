"""Matrices multiplied as they are stored, and experts in two stacked tensors.

Floats are for every device and dtype. Quantised matrices are for GPUs, and are converted to floats
in each product (weight-only quantisation).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.experts.grouped_mlp import ExpertMatrices, Gate, grouped_mlp
from kernels.layers.linear import linear
from kernels.layers.quantised_linear import quantised_linear
from kernels.quantised import SMALLEST_GROUP, QuantFormat, Quantisation


@dataclass(frozen=True, slots=True, eq=False)
class StackedLinear:
    """All experts in two stacked tensors.

    Attributes:
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
    """

    gate: Gate
    gate_up: ExpertMatrices
    down: ExpertMatrices

    def slot(self, number: int) -> tuple[Tensor | None, ...]:
        tensors = (*self.gate_up.tensors, *self.down.tensors)
        return tuple(None if each is None else each[number] for each in tensors)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return grouped_mlp(x, self.gate_up, self.down, weights, ids, self.gate)


def stack(
    stored: StoredExperts,
    count: int,
    gate: Gate,
    device: torch.device,
    dtype: torch.dtype,
    keeps: Callable[[QuantFormat | None], bool] = lambda stored: False,
) -> StackedLinear:
    """Copy the experts one after the other to their final place.

    Args:
        keeps: returns whether matrices of a format stay as stored. Others become floats.
    """
    stacks: list[ExpertMatrices] = []
    for number, one in enumerate(stored):
        pairs = ((one.gate_up, one.gate_up_bias), (one.down, one.down_bias))
        parts = [_as_held(*pair, dtype, keeps) for pair in pairs]
        stacks = stacks or [_empty(part, count, device) for part in parts]
        for whole, part in zip(stacks, parts, strict=True):
            for here, there in zip(whole.tensors, part.tensors, strict=True):
                if here is not None and there is not None:
                    here[number].copy_(there)
    return StackedLinear(gate, *stacks)


def _as_held(
    matrix: Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    keeps: Callable[[QuantFormat | None], bool],
) -> ExpertMatrices:
    """Return the matrix of one expert in its final format, without the first dimension."""
    if not keeps(matrix.format):
        return ExpertMatrices(matrix.floats().to(dtype), bias)
    numbers, quantisation = matrix.quantised()
    return ExpertMatrices(numbers, bias, quantisation)


def _empty(one: ExpertMatrices, count: int, device: torch.device) -> ExpertMatrices:
    """Return memory for `count` matrices like this one."""

    def like(part: Tensor) -> Tensor:
        return torch.empty((count, *part.shape), dtype=part.dtype, device=device)

    bias, quantisation = one.bias, one.quantisation
    return ExpertMatrices(
        like(one.numbers),
        None if bias is None else like(bias),
        None if quantisation is None else quantisation.with_tensors(like),
    )


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
