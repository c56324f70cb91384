"""A stored matrix before its conversion to a form, and the part of it that a rank keeps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.quantised import QuantFormat, Quantisation, packed, weights_of

_NOTHING = torch.empty(0)

INT8 = QuantFormat("int8")  # by channel


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A stored matrix. A weight is (number - zero) * scale.

    Attributes:
        numbers: [out, in]. Floats without a format. Otherwise int8, float8_e4m3fn, or uint8 with
            one 4-bit number each.
        format: None: not quantised.
        scales: float32 [out, groups], bfloat16 for fp4. Unused without a format.
        zeros: uint8 [out, groups], for int4. Otherwise unused.
        order: int64 [in], for a reordered format: the input of each number of a row. Otherwise
            unused.
    """

    numbers: Tensor
    format: QuantFormat | None = None
    scales: Tensor = _NOTHING
    zeros: Tensor = _NOTHING
    order: Tensor = _NOTHING

    def floats(self) -> Tensor:
        if self.format is None:
            return self.numbers
        wide = weights_of(self.numbers, self._quantisation(self.format))
        return wide[:, self.order.argsort()] if self.format.reordered else wide

    def quantised(self) -> tuple[Tensor, Quantisation]:
        """Return the numbers of a quantised matrix as kernels read them, and their scales."""
        assert self.format is not None
        numbers = packed(self.numbers) if self.format.bits == 4 else self.numbers
        return numbers.contiguous(), self._quantisation(self.format)

    def with_rows(self, choose: Callable[[Tensor], Tensor]) -> "Matrix":
        """Return the matrix with the rows that `choose` selects from a tensor with all rows."""
        numbers, scales, zeros = map(choose, (self.numbers, self.scales, self.zeros))
        return Matrix(numbers, self.format, scales, zeros, self.order)

    def columns(self, inputs: range) -> "Matrix":
        """Return the matrix with these inputs of all rows, contiguous."""
        part = self.format and self.format.within(inputs, self.numbers.shape[1])
        if part is None or self.format is None:
            return Matrix(self.floats()[:, inputs.start : inputs.stop].contiguous())
        if part.reordered:
            return self
        numbers = self.numbers[:, inputs.start : inputs.stop].contiguous()
        if not part.group:
            return Matrix(numbers, part, self.scales, self.zeros)
        groups = torch.arange(inputs.start, inputs.stop, part.group) // self.format.group
        zeros = self.zeros[:, groups].contiguous() if self.format.kind == "int4" else self.zeros
        return Matrix(numbers, part, self.scales[:, groups].contiguous(), zeros)

    def _quantisation(self, form: QuantFormat) -> Quantisation:
        return Quantisation(self.scales, form.group, self.zeros if form.kind == "int4" else None)


@dataclass(frozen=True, slots=True, eq=False)
class StoredExpert:
    """The stored matrices of one expert.

    Attributes:
        gate_up: [2 * inner, hidden].
        down: [hidden, inner].
        gate_up_bias, down_bias: one bias per row, or None.
    """

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def joined(matrices: Sequence[Matrix]) -> Matrix:
    """Concatenate matrices along the outputs. They stay quantised if all have the same format and
    order of inputs."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    form = common_format([matrix.format for matrix in matrices])
    if form is None or not all(torch.equal(each.order, first.order) for each in matrices):
        return Matrix(torch.cat([matrix.floats() for matrix in matrices]))
    numbers, scales, zeros = (
        torch.cat([getattr(matrix, part) for matrix in matrices])
        for part in ("numbers", "scales", "zeros")
    )
    return Matrix(numbers, form, scales, zeros, first.order)


def common_format(formats: Sequence[QuantFormat | None]) -> QuantFormat | None:
    """Return the format of matrices after concatenation."""
    return formats[0] if len(set(formats)) == 1 else None


Ranges: TypeAlias = tuple[range, ...]
NO_CUTS: Mapping[str, Ranges] = {}


def scaled(units: range, size: int) -> range:
    """Return the range of numbers of consecutive units with `size` numbers each."""
    return range(units.start * size, units.stop * size)


def kept(tensor: Tensor, ranges: Ranges | None) -> Tensor:
    """Return these ranges of the first dimension, concatenated. Copies nothing if they are
    adjacent.

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
        """Return the part of the whole matrix. Scales stay those of whole rows."""
        rows = matrix.with_rows(lambda tensor: kept(tensor, self.outputs))
        return rows.columns(self.inputs) if self.splits_inputs else rows

    def cut_inputs(self, numbers: Tensor) -> Tensor:
        """Return the kept columns of [any, columns], contiguous if any are dropped."""
        if not self.splits_inputs:
            return numbers
        return numbers[:, self.inputs.start : self.inputs.stop].contiguous()
