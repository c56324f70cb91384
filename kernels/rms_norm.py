"""Residual addition and RMSNorm, rounded where Hugging Face's models round."""

import torch
from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual).

    The sum is rounded to x's dtype, then normed in float32, rounded, then multiplied by weight.

    Args:
        x: [n, hidden], rows may be strided.
        residual: like x, or None for nothing to add (the sum is then x itself, not a copy).
        weight: [hidden].
    Raises:
        ValueError: wrong shapes.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"[n, hidden] and [hidden] expected, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} is not like x {tuple(x.shape)}")
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else residual + x
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; x of any rank."""
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight
