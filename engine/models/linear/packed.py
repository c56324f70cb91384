"""Matrices in oneDNN's layout. A product of few rows runs at memory bandwidth.

CPU only. The result differs from a plain product by the order of its sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear import onednn
from engine.models.linear.experts import SeparateLinear, each
from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import StoredExperts
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A matrix in oneDNN's layout.

    Attributes:
        weight: opaque, [out, in].
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: Tensor) -> Tensor:
        return onednn.product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedForm:
    dtype: torch.dtype

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(onednn.pack(matrix.floats().to(self.dtype)), bias)

    def rounded(self, matrix: Matrix) -> Matrix:
        return matrix

    def tied(self, embedding: Tensor) -> PackedLinear:
        return self.hold(Matrix(embedding))

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SeparateLinear:
        return each(self, stored, gate)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return rows * columns * self.dtype.itemsize

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.num_bytes(rows, columns)
