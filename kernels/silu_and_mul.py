"""silu(gate) * up over a fused gate-up projection."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :d]) * x[:, d:], in float32, rounded once.

    Args:
        x: contiguous [n, 2d], the gate's columns first.
    Returns:
        [n, d] of x's dtype.
    Raises:
        ValueError: x is not contiguous [n, 2d].
    """
    if x.ndim != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"contiguous [n, 2d] expected, got {tuple(x.shape)}")
    return silu_and_mul_reference(x)


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(x.dtype)
