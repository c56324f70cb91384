"""Matrices in panels, for products compiled for this CPU, which run at memory bandwidth.

In float32, bfloat16 and int8, a row's result does not depend on the other rows. Reported sizes
exclude the padding of a matrix's last panel.
"""

from dataclasses import dataclass

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
class Panels(PanelMatrix):
    """A matrix of floats in panels."""

    @property
    def in_layers(self) -> bool:
        """Return whether a compiled call of whole layers can use it: rows need no padding."""
        return self.inputs * self.panels.itemsize % WORD_BYTES == 0

    def apply(self, x: Tensor) -> Tensor:
        return self.operators.float_product(x, self.panels, self.outputs, self.bias)


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
        return Panels(self.operators, self.operators.pack_panels(stored), outputs, inputs, bias)

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
class Int8Panels(PanelMatrix):
    """An int8 matrix in panels, with scales float32 [out] and zeros int32 [out]."""

    @property
    def in_layers(self) -> bool:
        return True

    def apply(self, x: Tensor) -> Tensor:
        assert self.scales is not None and self.zeros is not None
        return self.operators.int8_product(x, self.panels, self.scales, self.zeros, self.bias)


@dataclass(frozen=True, slots=True)
class Int8PanelForm(RoundingForm):
    """A form that holds int8 matrices in panels, rounded as in `int8`."""

    operators: Operators

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Int8Panels:
        own = rounded(matrix)
        packed, zeros = self.operators.pack_panels(own.numbers), row_sums(own.numbers) * ZERO
        scales = own.scales.flatten()
        outputs, inputs = own.numbers.shape
        return Int8Panels(self.operators, packed, outputs, inputs, bias, scales, zeros)
