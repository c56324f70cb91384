"""oneDNN's products with weights in the layout of its own kernels, and the form with this layout.

A product of few rows runs at memory bandwidth. torch has no public names for these functions, so
all private names are in this file. Tests compare their results with plain products, on the
installed torch. One layout is for any number of rows.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form
from kernels.quantised import QuantFormat

_BFLOAT16 = torch.ops.mkldnn
_BFLOAT16_NEEDED = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
_INT8 = torch.ops.onednn
_INT8_NEEDED = ("qlinear_prepack", "qlinear_pointwise")
_NO_OFFSET = torch.zeros(1, dtype=torch.int32)


def packs_bfloat16() -> bool:
    """Return whether this torch has the bfloat16 products and they are faster on this processor."""
    return _has(_BFLOAT16, _BFLOAT16_NEEDED) and bool(_BFLOAT16._is_mkldnn_bf16_supported())


def multiplies_int8() -> bool:
    """Return whether this torch has the int8 products and this processor adds bytes without
    saturation."""
    return _has(_INT8, _INT8_NEEDED) and torch.cpu._is_vnni_supported()


def pack(weight: Tensor) -> Tensor:
    """Return the numbers of bfloat16 [out, in] as an opaque tensor of the same size in bytes."""
    return cast(Tensor, _BFLOAT16._reorder_linear_weight(weight, None))


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [n, in] times a matrix from `pack` in x's dtype, plus bias: [n, out]."""
    return cast(Tensor, _BFLOAT16._linear_pointwise(x, packed, bias, "none", [], ""))


def pack_int8(weight: Tensor) -> Tensor:
    """Return the numbers of int8 [out, in] as an opaque tensor of the same size in bytes."""
    return cast(Tensor, _INT8.qlinear_prepack(weight, None))


def int8_product(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return (x W^T) * scale + bias with exact sums.

    Args:
        x: uint8 [n, in].
        packed: result of `pack_int8`.
        scale, bias: float32 [out].
    Returns:
        float32 [n, out].
    """
    y = _INT8.qlinear_pointwise(
        x, 1.0, 0, packed, scale, _NO_OFFSET, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return cast(Tensor, y)


def _has(operators: object, names: tuple[str, ...]) -> bool:
    return all(hasattr(operators, name) for name in names)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A matrix in oneDNN's layout.

    Attributes:
        weight: opaque, [out, in].
    """

    weight: Tensor
    bias: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedForm(Form):
    dtype: torch.dtype

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(pack(matrix.floats().to(self.dtype)), bias)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return rows * columns * self.dtype.itemsize
