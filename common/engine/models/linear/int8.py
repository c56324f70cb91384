"""Matrices in 8 bits with a scale for each channel, by inputs in 8 bits with one for each row.

Sums are of integers and exact: what a row gives does not depend on the rows beside it. Only on a
CPU that multiplies bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.linear import onednn

_LARGEST = 127.0
_ZERO = 128  # the byte that stands for an input of 0: the processor takes unsigned ones
_ROUNDING = torch.tensor(_ZERO + 0.5)
_SMALLEST = torch.tensor(1e-30)  # scale of a row of zeros
_BLOCK_NUMBERS = 1 << 19  # quantised at a time: what is wide is small


@dataclass(frozen=True, slots=True, eq=False)
class Int8Channel:
    """weight: opaque, int8 [out, in]; scale: float32 [out]; offset: float32 [out], takes off
    what inputs of _ZERO add; bias: [out]."""

    weight: Tensor
    scale: Tensor
    offset: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + self.offset.nbytes

    def apply(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.add(_SMALLEST, wide.abs().amax(-1, keepdim=True), alpha=1 / _LARGEST)
        rounded = torch.addcdiv(_ROUNDING, wide, scale).to(torch.uint8)
        y = onednn.int8_product(rounded, self.weight, self.scale, self.offset).mul_(scale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Int8Form:
    """Quantised from the stored numbers to the nearest of 255 for each channel."""

    def hold(self, stored: Tensor, bias: Tensor | None) -> Int8Channel:
        weight = torch.empty(stored.shape, dtype=torch.int8)
        scale = torch.empty(stored.shape[0])
        offset = torch.empty(stored.shape[0])
        rows = max(1, _BLOCK_NUMBERS // stored.shape[1])
        for start in range(0, stored.shape[0], rows):
            block = slice(start, start + rows)
            wide = stored[block].float()
            scale[block] = wide.abs().amax(-1).div_(_LARGEST).add_(_SMALLEST)
            weight[block] = (wide / scale[block, None]).round_()
            offset[block] = weight[block].sum(-1) * scale[block] * -_ZERO
        return Int8Channel(onednn.pack_int8(weight), scale, offset, bias)

    def tied(self, embedding: Tensor) -> Int8Channel:
        return self.hold(embedding, None)

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + 2 * torch.float32.itemsize)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.num_bytes(rows, columns)
