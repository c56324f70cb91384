"""Weight-only quantisation: formats of weights in 8 or 4 bits, which kernels widen in products.

A weight is (number - zero) * scale. Consecutive inputs of a row share scale and zero point. Numbers
are int8, fp8 (e4m3), integers from 0 to 15, or 4-bit floats (e2m1). A byte has two 4-bit numbers,
the first one in its lower half.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.narrow import FIRST_ARCHITECTURE

# Inputs of one multiplication of tensor cores. A group is a multiple of it.
SMALLEST_GROUP = 16
# Values of e2m1, by code.
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


# int4: 0 to 15, with zero points. fp8: e4m3. fp4: e2m1, whose scales are powers of two.
NumberKind: TypeAlias = Literal["int8", "fp8", "int4", "fp4"]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """The stored numbers of a quantised matrix.

    Attributes:
        group: consecutive inputs of a row that share a scale. 0: all.
        reordered: inputs are not in their original order, for example sorted by the size of their
            activations.
    """

    kind: NumberKind
    group: int = 0
    reordered: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "fp4") else 8

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the numbers, of their scales and zero points, and of the order."""
        groups = -(-columns // self.group) if self.group else 1
        scale = (2 if self.kind == "fp4" else 4) + (self.kind == "int4")
        order = columns * torch.int64.itemsize if self.reordered else 0
        return rows * (columns * self.bits // 8 + groups * scale) + order

    def within(self, inputs: range, columns: int) -> "QuantFormat | None":
        """Return the format of these inputs of a matrix with `columns` columns. Groups that would
        be cut are divided. None: floats, because the inputs are reordered."""
        if len(inputs) == columns:
            return self
        if self.reordered:
            return None
        if not self.group:
            return self
        end = 0 if inputs.stop == columns else inputs.stop
        return replace(self, group=math.gcd(self.group, inputs.start, end))


@dataclass(frozen=True, slots=True, eq=False)
class Quantisation:
    """Scales and zero points of matrices [..., out, in].

    Attributes:
        scales: contiguous [..., out, groups], float32 or bfloat16.
        group: inputs that share a scale, a multiple of SMALLEST_GROUP. 0: all.
        zeros: contiguous uint8 [..., out, groups]. None: the numbers are not 4-bit integers.
    """

    scales: Tensor
    group: int = 0
    zeros: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Quantisation":
        zeros = None if self.zeros is None else change(self.zeros)
        return Quantisation(change(self.scales), self.group, zeros)

    def check(self, numbers: Tensor) -> None:
        """Raise ValueError if scales and zero points do not fit the numbers."""
        columns = num_inputs(numbers)
        if numbers.dtype not in (torch.int8, torch.uint8, torch.float8_e4m3fn):
            raise ValueError(f"numbers: int8, fp8 or 4 bits expected, got {numbers.dtype}")
        if self.group % SMALLEST_GROUP or columns % 2:
            raise ValueError(f"group: a multiple of {SMALLEST_GROUP} expected, got {self.group}")
        shape = (*numbers.shape[:-1], triton.cdiv(columns, self.group) if self.group else 1)
        for each in (self.scales, self.zeros):
            if each is not None and (each.shape != shape or not each.is_contiguous()):
                raise ValueError(f"scales, zeros: {shape} expected, got {tuple(each.shape)}")

    def arguments(self, numbers: Tensor) -> dict[str, Any]:
        """Return a kernel's arguments. A single group may end within a tile, because numbers
        outside a matrix are zeros."""
        four = "e2m1" if self.zeros is None else "int4"
        return {
            "scales_ptr": self.scales,
            "zeros_ptr": self.zeros,
            "GROUP": self.group or triton.next_power_of_2(num_inputs(numbers)),
            "GROUPS": self.scales.shape[-1],
            "FORMAT": four if numbers.dtype == torch.uint8 else "8 bits",
            "PACKED": 2 if numbers.dtype == torch.uint8 else 1,
        }


# A kernel's arguments for matrices of the inputs' dtype.
NOT_QUANTISED: dict[str, Any] = {
    "scales_ptr": None,
    "zeros_ptr": None,
    "GROUP": 0,
    "GROUPS": 0,
    "FORMAT": "floats",
    "PACKED": 1,
}


def num_inputs(numbers: Tensor) -> int:
    return numbers.shape[-1] * (2 if numbers.dtype == torch.uint8 else 1)


def widens(stored: QuantFormat, where: torch.device) -> bool:
    """Return whether kernels widen these numbers on a CUDA device."""
    if stored.reordered:
        return False
    if stored.kind != "fp8":
        return True
    major, minor = torch.cuda.get_device_capability(where)
    return 10 * major + minor >= FIRST_ARCHITECTURE


def packed(codes: Tensor) -> Tensor:
    """Return codes from 0 to 15, uint8 [..., in], as uint8 [..., in / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def widened(numbers: Tensor, quantisation: Quantisation) -> Tensor:
    """Return the weights of one matrix, float32 [out, in], from numbers as kernels read them."""
    if numbers.dtype == torch.uint8:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    return weights_of(numbers, quantisation)


def weights_of(numbers: Tensor, quantisation: Quantisation) -> Tensor:
    """Return the weights of one matrix, float32 [out, in].

    Args:
        numbers: [out, in]. 4-bit numbers are not packed.
    """
    zeros, group = quantisation.zeros, quantisation.group or numbers.shape[1]
    if numbers.dtype == torch.uint8 and zeros is None:
        wide = torch.tensor(FLOATS, device=numbers.device)[numbers.int()]
    else:
        wide = numbers.float()
    for number in range(quantisation.scales.shape[-1]):
        part = wide[:, number * group : (number + 1) * group]
        if zeros is not None:
            part -= zeros[:, number, None]
        part *= quantisation.scales[:, number, None]
    return wide


@triton.jit
def matrix_tile(
    ptr,
    rows,
    row_ok,
    start,
    IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Load the numbers of these rows from the input `start` on: [rows, BLOCK_K], with zeros outside
    the matrix. 4-bit codes become integers. For e2m1 these are twice the value."""
    cols = start // PACKED + tl.arange(0, BLOCK_K // PACKED)
    places = ptr + rows[:, None].to(tl.int64) * (IN // PACKED) + cols[None, :]
    mask = row_ok[:, None]
    if IN % BLOCK_K != 0:
        mask = mask & (cols < IN // PACKED)[None, :]
    numbers = tl.load(places, mask=mask, other=0.0)
    if PACKED == 2:
        numbers = tl.interleave(numbers & 15, numbers >> 4).to(tl.int32)
    if FORMAT == "e2m1":
        exponent, fraction = (numbers >> 1) & 3, numbers & 1
        size = tl.where(exponent > 0, (2 + fraction) << tl.maximum(exponent - 1, 0), fraction)
        numbers = tl.where(numbers > 7, -size, size)
    return numbers


@triton.jit
def add_product(
    acc,
    x,
    numbers,
    scales_ptr,
    zeros_ptr,
    rows,
    row_ok,
    start,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return acc + x [m, k] times a `matrix_tile` [n, k] transposed, whose inputs are in one group.

    `rows` are the rows of the scales. Numbers are widened exactly, and their sum is scaled.
    """
    if FORMAT == "floats":
        return tl.dot(x, tl.trans(numbers.to(x.dtype)), acc, input_precision="ieee")
    else:
        places = rows * GROUPS + start // GROUP
        scales = tl.load(scales_ptr + places, mask=row_ok, other=0.0).to(tl.float32)
        if FORMAT == "int4":
            zeros = tl.load(zeros_ptr + places, mask=row_ok, other=0).to(tl.int32)
            numbers = numbers - zeros[:, None]
        if FORMAT == "e2m1":
            scales *= 0.5
        product = tl.dot(x, tl.trans(numbers.to(x.dtype)), input_precision="ieee")
        return acc + product * scales[None, :]
