"""A form that multiplies matrices of one quantised format as they are, and holds other matrices in
another form."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.linear.experts import SeparateLinear, each
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True)
class AsStoredForm:
    """The two forms. CPU only.

    Attributes:
        format: of the matrices that stay as they are.
        quantised: multiplies them.
        rest: for all other matrices.
    """

    format: QuantFormat
    quantised: Form
    rest: Form

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        return self._form(matrix.format).hold(matrix, bias)

    def rounded(self, matrix: Matrix) -> Matrix:
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        return self.rest.tied(embedding)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SeparateLinear:
        return each(self, stored, gate)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return self._form(stored).num_bytes(rows, columns, stored)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.rest.tied_bytes(rows, columns)

    def _form(self, stored: QuantFormat | None) -> Form:
        return self.quantised if stored == self.format else self.rest
