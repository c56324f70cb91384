"""Rotary position embedding: the angles of a step, and the rotation.

Knows nothing of RoPE variants: they differ in the inverse frequencies that the model passes.
"""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Tensor:
    """Cosines and sines of every token's angles, once per step for all layers.

    Args:
        positions: int32 [num_tokens], token indices.
        inverse_frequencies: float32 [head_dim / 2].
        scale: multiplies both (yarn's attention factor; 1.0 elsewhere).
    Returns:
        float32 [2, num_tokens, head_dim / 2]: cosines, sines.
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if positions.ndim != 1 or inverse_frequencies.ndim != 1:
        raise ValueError(
            f"[n] and [d / 2] expected, got {tuple(positions.shape)} and "
            f"{tuple(inverse_frequencies.shape)}"
        )
    if inverse_frequencies.dtype != torch.float32:
        raise ValueError(f"inverse_frequencies: float32, got {inverse_frequencies.dtype}")
    angles = torch.outer(positions.float(), inverse_frequencies)
    return torch.stack((angles.cos(), angles.sin())).mul_(scale)


def rotate_reference(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates [num_tokens, heads, head_dim], halves paired as (i, i + head_dim / 2).

    In float32, rounded once: closer to the exact rotation than Hugging Face's bfloat16 one.
    """
    cos, sin = angles[0].unsqueeze(1), angles[1].unsqueeze(1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
