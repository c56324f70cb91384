"""Weight-only quantisation on a CPU: 4-bit weights in panels, converted to floats in each product.

Inputs are not rounded, and a row's result does not depend on the other rows. Reported sizes exclude
the padding of a matrix's last panel.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form
from kernels.cpu.layers import PanelMatrix
from kernels.cpu.operators import CODES, PANEL, Operators
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class CodePanels:
    """A 4-bit matrix in panels.

    Attributes:
        codes, scales, zeros: arguments of `Operators.weight_only_product`.
        order: for a reordered format, the input of each number.
    """

    operators: Operators
    format: QuantFormat
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.format.num_bytes(*self.shape)

    @property
    def matrix(self) -> PanelMatrix | None:
        """Return the matrix for layers in one compiled call. None if inputs are reordered."""
        if self.format.reordered:
            return None
        operators, codes, group = self.operators, self.codes, self.group
        return PanelMatrix(operators, codes, *self.shape, self.bias, self.scales, self.zeros, group)

    @property
    def group(self) -> int:
        return self.format.group or self.shape[1]

    def apply(self, x: Tensor) -> Tensor:
        if self.format.reordered:
            x = x.index_select(1, self.order)
        return self.operators.weight_only_product(
            x, self.codes, self.scales, self.zeros, self.group, self.shape[0], self.bias
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
            format=matrix.format,
            shape=(outputs, inputs),
            codes=self.operators.pack_codes(matrix.numbers),
            scales=_by_panel(matrix.scales),
            zeros=_by_panel(matrix.zeros) if matrix.format.kind == "int4" else None,
            order=matrix.order,
            bias=bias,
        )

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        assert stored is not None
        return stored.num_bytes(rows, columns)


def _by_panel(of_groups: Tensor) -> Tensor:
    """Return [outputs, groups] as [panels, groups, PANEL], contiguous."""
    outputs, groups = of_groups.shape
    padded = F.pad(of_groups, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()
