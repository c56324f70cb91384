"""QK-norm, RoPE and the write of K and V into their pages, from one fused projection."""

import torch
from torch import Tensor

from kernels.rms_norm import rms_norm_reference
from kernels.rope import rotate_reference


def rope_and_store(
    qkv: Tensor,
    angles: Tensor,
    kv: Tensor,
    locations: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norms (optionally) and rotates Q and K; writes K and V of each token to its location.

    Order: norm, rounded, then rotation, rounded.

    Args:
        qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim], Q's columns first, then K's, V's.
        angles: float32 [2, num_tokens, head_dim / 2], of `rope_angles`.
        kv: one layer of the pool, [num_pages, kv_heads, 2, page_size, head_dim], any strides
            (pages are addressed in int64); written in place.
        locations: int64 [num_tokens], page * page_size + offset, all distinct.
        q_norm, k_norm: [head_dim] weights of an RMSNorm over each head, both or neither.
    Returns:
        Q, [num_tokens, heads, head_dim].
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    kv_heads, head_dim = kv.shape[1], kv.shape[-1]
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: [pages, kv_heads, 2, page_size, head_dim], got {tuple(kv.shape)}")
    if qkv.ndim != 2 or qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit kv {tuple(kv.shape)}")
    if angles.shape != (2, qkv.shape[0], head_dim // 2) or head_dim % 2:
        raise ValueError(f"angles {tuple(angles.shape)} do not fit qkv {tuple(qkv.shape)}")
    if locations.shape != qkv.shape[:1] or locations.dtype != torch.int64:
        raise ValueError(f"locations: int64 [n] expected, got {tuple(locations.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    return rope_and_store_reference(qkv, angles, kv, locations, q_norm, k_norm, eps)


def rope_and_store_reference(
    qkv: Tensor,
    angles: Tensor,
    kv: Tensor,
    locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    kv_heads, page_size, head_dim = kv.shape[1], kv.shape[3], kv.shape[4]
    packed = qkv.view(qkv.shape[0], -1, head_dim)
    heads = packed.shape[1] - 2 * kv_heads
    rotated = packed[:, : heads + kv_heads]
    if q_norm is not None and k_norm is not None:
        q = rms_norm_reference(packed[:, :heads], q_norm, eps)
        k = rms_norm_reference(packed[:, heads : heads + kv_heads], k_norm, eps)
        rotated = torch.cat((q, k), dim=1)
    rotated = rotate_reference(rotated, angles)
    pages, offsets = locations // page_size, locations % page_size
    by_token = kv.permute(0, 3, 2, 1, 4)  # [num_pages, page_size, 2, kv_heads, head_dim]
    by_token[pages, offsets] = torch.stack(
        (rotated[:, heads:], packed[:, heads + kv_heads :]), dim=1
    )
    return rotated[:, :heads]
