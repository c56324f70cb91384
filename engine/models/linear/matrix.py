"""A matrix as a checkpoint has it, before it is held in some form."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """numbers: [out, in]; of int8 with a scale for each row, float32 [out], else of floats."""

    numbers: Tensor
    scale: Tensor | None = None

    def floats(self) -> Tensor:
        return self.numbers if self.scale is None else self.numbers.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class StoredExpert:
    """gate_up: [2 * inner, hidden]; down: [hidden, inner]; biases: of each row, or none."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def joined(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix, output after output."""
    if len(matrices) == 1:
        return matrices[0]
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if len(scales) < len(matrices):
        return Matrix(torch.cat([matrix.floats() for matrix in matrices]))
    return Matrix(torch.cat([matrix.numbers for matrix in matrices]), torch.cat(scales))
