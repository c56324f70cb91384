"""A form that multiplies stored int8 matrices as they are, and holds other matrices in another
form."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.linear.experts import SeparateLinear, each
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.experts.grouped_mlp import Gate


@dataclass(frozen=True, slots=True)
class AsStoredForm:
    """The two forms. CPU only.

    Attributes:
        int8: multiplies stored int8 matrices.
        rest: for all other matrices.
    """

    int8: Form
    rest: Form

    def hold(self, stored: Tensor, bias: Tensor | None) -> Linear:
        return self.rest.hold(stored, bias)

    def hold_int8(self, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Linear:
        return self.int8.hold_int8(stored, scale, bias)

    def rounded(self, matrix: Matrix) -> Matrix:
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        return self.rest.tied(embedding)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SeparateLinear:
        return each(self, stored, gate)

    def num_bytes(self, rows: int, columns: int) -> int:
        return self.rest.num_bytes(rows, columns)

    def int8_bytes(self, rows: int, columns: int) -> int:
        return self.int8.int8_bytes(rows, columns)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.rest.tied_bytes(rows, columns)
