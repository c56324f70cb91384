"""Products with matrices as they are stored: small ones, and those that others read too."""

import torch.nn.functional as F
from torch import Tensor

from kernels import device
from kernels.layers.quantised_linear import multiplied
from kernels.quantised import NOT_QUANTISED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [n, in] times weight [out, in] transposed, plus bias [out]: [n, out], all of one
    dtype.

    With compiled operations for this dtype, and on a GPU with `device.use_batch_invariant`, no row
    affects the bits of another.

    Raises:
        ValueError: a strided weight on such a GPU.
    """
    if device.uses_triton(x):
        if not device.batch_invariant():
            return F.linear(x, weight, bias)
        if not weight.is_contiguous():
            raise ValueError(f"a contiguous weight expected, got strides {weight.stride()}")
        return multiplied(x.contiguous(), weight, NOT_QUANTISED, bias)
    compiled = device.compiled(x)
    if compiled is not None and compiled.multiplies(x.dtype):
        return compiled.stored_product(x, weight, bias)
    return F.linear(x, weight, bias)
