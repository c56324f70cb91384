"""Matrices in panels, for products compiled for this CPU, which run at memory bandwidth.

In float32, bfloat16 and int8, a row's result does not depend on the other rows. Reported sizes
exclude the padding of a matrix's last panel.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.models.linear.dense import DenseLinear
from engine.models.linear.int8 import ZERO, RoundingForm, rounded, row_sums
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear
from kernels.cpu.layers import PanelMatrix
from kernels.cpu.operators import WORD_BYTES, Operators
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A matrix in panels.

    Attributes:
        weight: result of `Operators.pack_panels` for a matrix [out, in].
    """

    operators: Operators
    weight: Tensor
    shape: tuple[int, int]
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.weight.itemsize

    @property
    def matrix(self) -> PanelMatrix | None:
        """Return the matrix for layers in one compiled call. None if rows would need padding."""
        outputs, inputs = self.shape
        if inputs * self.weight.itemsize % WORD_BYTES:
            return None
        return PanelMatrix(self.operators, self.weight, outputs, inputs, self.bias)

    def apply(self, x: Tensor) -> Tensor:
        return self.operators.float_product(x, self.weight, self.shape[0], self.bias)


@dataclass(frozen=True, slots=True)
class PanelForm(Form):
    """A form that holds matrices in panels.

    Args:
        dtype: a dtype that `operators` multiplies.
    """

    dtype: torch.dtype
    operators: Operators

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Panels:
        stored = matrix.floats().to(self.dtype)
        outputs, inputs = stored.shape
        return Panels(self.operators, self.operators.pack_panels(stored), (outputs, inputs), bias)

    def tied(self, embedding: Tensor) -> Linear:
        """Return the tied head. In float32 a copy in panels would take too much memory, so the head
        uses the embedding itself."""
        return DenseLinear(embedding) if self._shares else self.hold(Matrix(embedding))

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return rows * columns * self.dtype.itemsize

    def tied_bytes(self, rows: int, columns: int) -> int:
        return 0 if self._shares else self.num_bytes(rows, columns)

    @property
    def _shares(self) -> bool:
        return self.dtype == torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Int8Panels:
    """An int8 matrix in panels.

    Attributes:
        weight: int8, result of `Operators.pack_panels` for a matrix [out, in]. See `int8_product`.
    """

    operators: Operators
    weight: Tensor
    shape: tuple[int, int]
    scales: Tensor  # float32 [out]
    zeros: Tensor  # int32 [out]
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) + self.scales.nbytes + self.zeros.nbytes

    @property
    def matrix(self) -> PanelMatrix:
        """Return the matrix for layers in one compiled call."""
        operators, weight, shape = self.operators, self.weight, self.shape
        return PanelMatrix(operators, weight, *shape, self.bias, self.scales, self.zeros)

    def apply(self, x: Tensor) -> Tensor:
        return self.operators.int8_product(x, self.weight, self.scales, self.zeros, self.bias)


@dataclass(frozen=True, slots=True)
class Int8PanelForm(RoundingForm):
    """A form that holds int8 matrices in panels, rounded as in `int8`."""

    operators: Operators

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Int8Panels:
        own = rounded(matrix)
        outputs, inputs = own.numbers.shape
        return Int8Panels(
            operators=self.operators,
            weight=self.operators.pack_panels(own.numbers),
            shape=(outputs, inputs),
            scales=own.scales.flatten(),
            zeros=row_sums(own.numbers) * ZERO,
            bias=bias,
        )
