"""A stored matrix, before it is converted to a form."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A stored matrix.

    Attributes:
        numbers: [out, in], int8 if there is a scale, else floats.
        scale: float32 [out], one for each row, or None.
    """

    numbers: Tensor
    scale: Tensor | None = None

    def floats(self) -> Tensor:
        return self.numbers if self.scale is None else self.numbers.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class StoredExpert:
    """The stored matrices of one expert.

    Attributes:
        gate_up: [2 * inner, hidden].
        down: [hidden, inner].
        gate_up_bias, down_bias: a bias for each row, or None.
    """

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def joined(matrices: Sequence[Matrix]) -> Matrix:
    """Join matrices along the outputs."""
    if len(matrices) == 1:
        return matrices[0]
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if len(scales) < len(matrices):
        return Matrix(torch.cat([matrix.floats() for matrix in matrices]))
    return Matrix(torch.cat([matrix.numbers for matrix in matrices]), torch.cat(scales))
