"""oneDNN's products with weights that it has laid out once for its own kernels.

torch has no public name for them: all names with an underscore are here. What they take and give
is checked by tests against plain products, on the torch that is installed.
"""

from typing import cast

import torch
from torch import Tensor

_OPS = torch.ops.mkldnn
_NEEDED = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")


def packs_bfloat16() -> bool:
    """Whether this torch has the products, and this processor's are worth it."""
    return all(hasattr(_OPS, name) for name in _NEEDED) and bool(_OPS._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """An opaque tensor with the numbers of [out, in], in as many bytes; `weight` is not kept.

    The layout is the same for any number of rows: one packing serves steps and prompts.
    """
    return cast(Tensor, _OPS._reorder_linear_weight(weight, None))


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] by a matrix of `pack` of x's dtype, plus bias: [n, out]."""
    return cast(Tensor, _OPS._linear_pointwise(x, packed, bias, "none", [], ""))
