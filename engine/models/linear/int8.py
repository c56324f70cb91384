"""int8 matrices with a scale per channel, multiplied by int8 inputs with a scale per row.

Sums are exact integers, so a row's result does not depend on the other rows. Only for CPUs with
int8 products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear import onednn
from engine.models.linear.matrix import INT8, Matrix
from engine.models.linear.protocol import Form
from kernels.quantised import QuantFormat

_LARGEST = 127.0
ZERO = 128  # byte for an input of 0, because the processor multiplies unsigned bytes
_ROUNDING = torch.tensor(ZERO + 0.5)
_SMALLEST = torch.tensor(1e-30)  # scale of a row of zeros
_BLOCK_NUMBERS = 1 << 19  # numbers quantised at a time, to limit temporary memory


@dataclass(frozen=True, slots=True, eq=False)
class Int8Channel:
    """An int8 matrix in oneDNN's layout.

    Attributes:
        weight: opaque, int8 [out, in].
        scale: float32 [out].
        offset: float32 [out], compensates for ZERO in the inputs.
        bias: [out].
    """

    weight: Tensor
    scale: Tensor
    offset: Tensor
    bias: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.add(_SMALLEST, wide.abs().amax(-1, keepdim=True), alpha=1 / _LARGEST)
        rounded = torch.addcdiv(_ROUNDING, wide, scale).to(torch.uint8)
        y = onednn.int8_product(rounded, self.weight, self.scale, self.offset).mul_(scale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


class RoundingForm(Form):
    """A form that rounds stored numbers to 255 values per channel."""

    __slots__ = ()

    def keeps(self, stored: QuantFormat, inputs: int) -> bool:
        return stored == INT8

    def rounded(self, matrix: Matrix) -> Matrix:
        return rounded(matrix)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return rows * (columns + 2 * torch.float32.itemsize)


@dataclass(frozen=True, slots=True)
class Int8Form(RoundingForm):
    """A form that holds int8 matrices in oneDNN's layout."""

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Int8Channel:
        own = rounded(matrix)
        scale = own.scales.flatten()
        offset = row_sums(own.numbers) * scale * -ZERO
        return Int8Channel(onednn.pack_int8(own.numbers), scale, offset, bias)


def rounded(matrix: Matrix) -> Matrix:
    """Return the matrix in INT8. Matrices of other formats are rounded to the nearest numbers."""
    if matrix.format == INT8:
        return matrix
    stored = matrix.floats()
    weight = torch.empty(stored.shape, dtype=torch.int8)
    scale = torch.empty(stored.shape[0], 1)
    rows = max(1, _BLOCK_NUMBERS // stored.shape[1])
    for start in range(0, stored.shape[0], rows):
        block = slice(start, start + rows)
        wide = stored[block].float()
        scale[block] = wide.abs().amax(-1, keepdim=True).div_(_LARGEST).add_(_SMALLEST)
        weight[block] = (wide / scale[block]).round_()
    return Matrix(weight, INT8, scale)


def row_sums(numbers: Tensor) -> Tensor:
    """Return the row sums, int32 [out], of int8 [out, in]."""
    rows = max(1, _BLOCK_NUMBERS // numbers.shape[1])
    return torch.cat([block.sum(-1, dtype=torch.int32) for block in torch.split(numbers, rows)])
