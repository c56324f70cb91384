"""Weight-only quantisation on a CPU: weights of 4 bits in panels, widened in each product.

Inputs are not rounded, and a row's result does not depend on the other rows. Reported sizes exclude
the padding of a matrix's last panel.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.experts import SeparateLinear, each
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.cpu.layers import PanelMatrix
from kernels.cpu.operators import CODES, PANEL, Operators
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class CodePanels:
    """A matrix of 4 bits in panels.

    Attributes:
        codes, scales, zeros: as `Operators.weight_only_product` takes them.
        order: of a reordered format, the input of each number.
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
        """Return the matrix for layers computed in one call. None if inputs are reordered."""
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
class CodePanelForm:
    """A form that keeps matrices of 4 bits, and holds others in `rest`.

    Matrices with groups that do not consist of whole words are others. A rank's part may have them.
    """

    operators: Operators
    rest: Form

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        outputs, inputs = matrix.numbers.shape
        if matrix.format is None or not keeps(matrix.format, inputs):
            return self.rest.hold(matrix, bias)
        zeros = _by_panel(matrix.zeros) if matrix.format.kind == "int4" else None
        codes, scales = self.operators.pack_codes(matrix.numbers), _by_panel(matrix.scales)
        shape = (outputs, inputs)
        return CodePanels(
            self.operators, matrix.format, shape, codes, scales, zeros, matrix.order, bias
        )

    def rounded(self, matrix: Matrix) -> Matrix:
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        return self.rest.tied(embedding)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SeparateLinear:
        return each(self, stored, gate)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        if stored is None or not keeps(stored, columns):
            return self.rest.num_bytes(rows, columns)
        return stored.num_bytes(rows, columns)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.rest.tied_bytes(rows, columns)


def keeps(stored: QuantFormat, inputs: int) -> bool:
    return stored.bits == 4 and stored.group % CODES == inputs % CODES == 0


def _by_panel(of_groups: Tensor) -> Tensor:
    """Return [outputs, groups] as [panels, groups, PANEL], contiguous."""
    outputs, groups = of_groups.shape
    padded = F.pad(of_groups, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()
