"""The part of a stored matrix that a rank keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.models.linear.matrix import Matrix

Ranges: TypeAlias = tuple[range, ...]
NO_CUTS: Mapping[str, Ranges] = {}


def scaled(units: range, size: int) -> range:
    """Return the numbers of consecutive units of `size` numbers each."""
    return range(units.start * size, units.stop * size)


def kept(tensor: Tensor, ranges: Ranges | None) -> Tensor:
    """Return these ranges of the first dimension, joined. Copies nothing if they are adjacent.

    Args:
        ranges: in ascending order. None: everything.
    """
    if ranges is None or sum(map(len, ranges)) == len(tensor):
        return tensor
    parts = [tensor[each.start : each.stop] for each in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The part of a stored matrix [rows, columns] that a rank keeps.

    Attributes:
        outputs: kept rows, in ascending order.
        inputs: kept columns.
    """

    rows: int
    columns: int
    outputs: Ranges
    inputs: range

    @classmethod
    def of(
        cls, rows: int, columns: int, outputs: Ranges | None = None, inputs: range | None = None
    ) -> "MatrixPart":
        """Return the part with these ranges. None: everything."""
        kept_rows = (range(rows),) if outputs is None else outputs
        return cls(rows, columns, kept_rows, range(columns) if inputs is None else inputs)

    @property
    def num_outputs(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def splits_inputs(self) -> bool:
        return len(self.inputs) < self.columns

    def cut(self, matrix: Matrix) -> Matrix:
        """Return the part of the whole matrix. Scales are those of the whole rows."""
        rows = matrix.with_rows(lambda tensor: kept(tensor, self.outputs))
        return rows.columns(self.inputs) if self.splits_inputs else rows

    def cut_inputs(self, numbers: Tensor) -> Tensor:
        """Return the kept columns of [any, columns], contiguous if any are dropped."""
        if not self.splits_inputs:
            return numbers
        return numbers[:, self.inputs.start : self.inputs.stop].contiguous()
