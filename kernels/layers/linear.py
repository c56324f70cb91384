"""Products with matrices as they are stored: small ones, and those that others read too."""

import torch.nn.functional as F
from torch import Tensor

from kernels import device


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [n, in] times weight [out, in] transposed, plus bias [out]: [n, out], all of one
    dtype.

    With compiled operations that multiply this dtype, no row affects the bits of another.
    """
    compiled = None if device.uses_triton(x) else device.compiled(x)
    if compiled is not None and compiled.multiplies(x.dtype):
        return compiled.stored_product(x, weight, bias)
    return F.linear(x, weight, bias)
