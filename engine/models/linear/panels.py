"""Matrices in panels, for products compiled for this CPU, which run at memory bandwidth.

4-bit weights in panels are converted to floats in each product (weight-only quantisation). A row's
result does not depend on the other rows. Reported sizes exclude the padding of a matrix's last
panel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.dense import DenseLinear
from engine.models.linear.int8 import ZERO, RoundingForm, rounded, row_sums
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear
from kernels.cpu.layers import PanelMatrix
from kernels.cpu.operators import CODES, PANEL, WORD_BYTES, Operators
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CodePanels(PanelMatrix):
    """A 4-bit matrix in panels.

    Attributes:
        order: for a reordered format, the input of each number.
    """

    format: QuantFormat
    order: Tensor

    @property
    def in_layers(self) -> bool:
        return not self.format.reordered

    def apply(self, x: Tensor) -> Tensor:
        assert self.scales is not None
        if self.format.reordered:
            x = x.index_select(1, self.order)
        return self.operators.weight_only_product(
            x, self.panels, self.scales, self.zeros, self.group, self.outputs, self.bias
        )


@dataclass(frozen=True, slots=True)
class CodePanelForm(Form):
    """A form for 4-bit matrices whose groups consist of whole words. A rank's part may have other
    groups."""

    operators: Operators

    def keeps(self, stored: QuantFormat, inputs: int) -> bool:
        return stored.bits == 4 and stored.group % CODES == inputs % CODES == 0

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> CodePanels:
        outputs, inputs = matrix.numbers.shape
        assert matrix.format is not None
        return CodePanels(
            operators=self.operators,
            panels=self.operators.pack_codes(matrix.numbers),
            outputs=outputs,
            inputs=inputs,
            bias=bias,
            scales=_by_panel(matrix.scales),
            zeros=_by_panel(matrix.zeros) if matrix.format.kind == "int4" else None,
            group=matrix.format.group or inputs,
            format=matrix.format,
            order=matrix.order,
        )

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        assert stored is not None
        return stored.num_bytes(rows, columns)


def _by_panel(of_groups: Tensor) -> Tensor:
    """Return [outputs, groups] as [panels, groups, PANEL], contiguous."""
    outputs, groups = of_groups.shape
    padded = F.pad(of_groups, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()
