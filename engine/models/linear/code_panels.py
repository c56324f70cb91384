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
