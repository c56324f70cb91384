"""oneDNN's products with weights that it has laid out once for its own kernels.

torch has no public name for them: all names with an underscore are here. What they take and give
is checked by tests against plain products, on the torch that is installed. One layout serves any
number of rows.
"""

from typing import cast

import torch
from torch import Tensor

_BFLOAT16 = torch.ops.mkldnn
_BFLOAT16_NEEDED = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
_INT8 = torch.ops.onednn
_INT8_NEEDED = ("qlinear_prepack", "qlinear_pointwise")
_NO_OFFSET = torch.zeros(1, dtype=torch.int32)


def packs_bfloat16() -> bool:
    """Whether this torch has the products, and this processor's are worth it."""
    return _has(_BFLOAT16, _BFLOAT16_NEEDED) and bool(_BFLOAT16._is_mkldnn_bf16_supported())


def multiplies_int8() -> bool:
    """Whether this torch has the products, and this processor adds up bytes without saturation."""
    return _has(_INT8, _INT8_NEEDED) and torch.cpu._is_vnni_supported()


def pack(weight: Tensor) -> Tensor:
    """An opaque tensor with the numbers of bfloat16 [out, in], in as many bytes."""
    return cast(Tensor, _BFLOAT16._reorder_linear_weight(weight, None))


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] by a matrix of `pack` of x's dtype, plus bias: [n, out]."""
    return cast(Tensor, _BFLOAT16._linear_pointwise(x, packed, bias, "none", [], ""))


def pack_int8(weight: Tensor) -> Tensor:
    """An opaque tensor with the numbers of int8 [out, in], in as many bytes."""
    return cast(Tensor, _INT8.qlinear_prepack(weight, None))


def int8_product(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """(x W^T) * scale + bias, whose sums are exact.

    Args:
        x: uint8 [n, in].
        packed: of `pack_int8`.
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
