"""QK-norm, RoPE and the write of K and V into their pages, from one fused projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.bound import bound
from kernels.layers.rms_norm import rms_norm_reference, weighted
from kernels.layers.rope import rotate_reference
from kernels.narrow import UNSCALED, KVScales, kept, largest, may_keep
from kernels.pages.store_kv import store_kv_reference

BLOCK = 1024  # elements per program: in 16 bits, 16 bytes per thread of each half, in 2 warps


def rope_and_store(
    qkv: Tensor,
    angles: Tensor,
    kv: Tensor,
    locations: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: KVScales = UNSCALED,
    gated: bool = False,
) -> Tensor:
    """Rotate Q and K, after an optional norm, and write K and V of each token to its location.

    The norm is rounded as in `add_rms_norm`. The rotation is in float32 and rounded once.

    Args:
        qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim], Q's columns first, then K's, V's. Rows
            may be strided.
        angles: contiguous float32 [2, num_tokens, pairs], from `rope_angles`. Each head's first 2 *
            pairs numbers are rotated.
        kv: one layer of the pool, [num_pages, kv_heads, 2, page_size, head_dim] of qkv's dtype or a
            narrow one, any strides but the last, which is 1 (pages are addressed in int64). Written
            in place.
        locations: contiguous int64 [num_tokens], page * page_size + offset, all distinct. -1: K and
            V of this token are not written.
        q_norm, k_norm: contiguous [head_dim] weights of an RMSNorm over each head, of qkv's dtype
            or float32. Both or neither.
        scales: divisors of K and V in a narrow dtype.
        gated: each head's query is followed by a gate of equal size, which is skipped. Q then has
            twice the columns.
    Returns:
        Q, [num_tokens, heads, head_dim].
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if kv.ndim != 5 or kv.shape[2] != 2 or kv.shape[4] % 2:
        raise ValueError(f"kv: [pages, kv_heads, 2, page_size, head_dim], got {tuple(kv.shape)}")
    kv_heads, head_dim = kv.shape[1], kv.shape[4]
    of_queries = qkv.shape[-1] - 2 * kv_heads * head_dim
    if qkv.ndim != 2 or of_queries <= 0 or of_queries % (head_dim * (2 if gated else 1)):
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit kv {tuple(kv.shape)}")
    if not may_keep(kv.dtype, qkv.dtype) or qkv.stride(1) != 1 or kv.stride(4) != 1:
        raise ValueError(f"qkv {qkv.dtype} {qkv.stride()} does not fit kv {kv.dtype} {kv.stride()}")
    fits = angles.ndim == 3 and angles.shape[:2] == (2, qkv.shape[0])
    if not fits or not 0 < angles.shape[2] <= head_dim // 2 or not angles.is_contiguous():
        raise ValueError(f"angles {tuple(angles.shape)} do not fit qkv {tuple(qkv.shape)}")
    if locations.shape != qkv.shape[:1] or locations.dtype != torch.int64:
        raise ValueError(f"locations: int64 [n] expected, got {tuple(locations.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != (head_dim,) or norm.stride(0) != 1):
            raise ValueError(f"norms: contiguous [{head_dim}] expected, got {tuple(norm.shape)}")
    if device.uses_triton(qkv):
        return rope_and_store_triton(qkv, angles, kv, locations, q_norm, k_norm, eps, scales, gated)
    if gated:
        qkv = _without_gates(qkv, of_queries, head_dim)
    compiled = device.compiled(qkv)
    if compiled is not None and kv.dtype == qkv.dtype:
        return compiled.rope_and_store(qkv, angles, kv, locations, q_norm, k_norm, eps)
    if compiled is not None:
        page = qkv.new_empty(1, kv_heads, 2, len(qkv), head_dim)
        places = torch.arange(len(qkv))
        q = compiled.rope_and_store(qkv, angles, page, places, q_norm, k_norm, eps)
        k, v = page[0].permute(1, 2, 0, 3)
        store_kv_reference(k, v, kv, locations, scales)
        return q
    return rope_and_store_reference(qkv, angles, kv, locations, q_norm, k_norm, eps, scales)


def _without_gates(qkv: Tensor, of_queries: int, head_dim: int) -> Tensor:
    queries = qkv[:, :of_queries].view(len(qkv), of_queries // (2 * head_dim), 2, head_dim)[:, :, 0]
    return torch.cat((queries.flatten(1), qkv[:, of_queries:]), dim=1)


def rope_and_store_reference(
    qkv: Tensor,
    angles: Tensor,
    kv: Tensor,
    locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: KVScales = UNSCALED,
) -> Tensor:
    kv_heads, head_dim = kv.shape[1], kv.shape[4]
    packed = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    heads = packed.shape[1] - 2 * kv_heads
    rotated = packed[:, : heads + kv_heads]
    if q_norm is not None and k_norm is not None:
        q = rms_norm_reference(packed[:, :heads], q_norm, eps)
        k = rms_norm_reference(packed[:, heads : heads + kv_heads], k_norm, eps)
        rotated = torch.cat((q, k), dim=1)
    rotated = rotate_reference(rotated, angles)
    k, v = rotated[:, heads:], packed[:, heads + kv_heads :]
    store_kv_reference(k, v, kv, locations, scales)
    return rotated[:, :heads]


def rope_and_store_triton(
    qkv: Tensor,
    angles: Tensor,
    kv: Tensor,
    locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: KVScales = UNSCALED,
    gated: bool = False,
) -> Tensor:
    num_tokens, kv_heads, page_size, head_dim = qkv.shape[0], kv.shape[1], kv.shape[3], kv.shape[4]
    of_head = 2 if gated else 1
    heads = (qkv.shape[1] // head_dim - 2 * kv_heads) // of_head
    q = torch.empty(num_tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        block_half = triton.next_power_of_2(head_dim // 2)
        block_heads = max(1, BLOCK // (2 * block_half))
        early = early_launch.launches_early()
        num_blocks = triton.cdiv(heads, block_heads) + triton.cdiv(kv_heads, block_heads)
        _rope_and_store_kernel[(num_tokens, num_blocks)](
            qkv,
            angles,
            kv,
            locations,
            q_norm,
            k_norm,
            q,
            qkv.stride(0),
            *kv.stride()[:4],
            eps,
            scales.key,
            scales.value,
            heads,
            of_head * head_dim,
            kv_heads,
            page_size,
            head_dim // 2,
            angles.shape[2],
            block_heads,
            block_half,
            largest(kv.dtype),
            early,
            launch_pdl=early,
            num_warps=2,
            enable_fp_fusion=True,
        )
    return q


@bound
@triton.jit(do_not_specialize=["locations_ptr"])
def _rope_and_store_kernel(
    qkv_ptr,
    angles_ptr,
    kv_ptr,
    locations_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    qkv_stride,
    page_stride,
    head_stride,
    kv_stride,
    offset_stride,
    eps,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process one token and one block of heads: first Q's blocks, then those of K and V."""
    early_launch.start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_q = block < q_blocks
    head = tl.where(is_q, block, block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head = head[:, None]
    # As wide as the heads, so that angles and weights are loaded in the layout of their use.
    col = tl.broadcast_to(tl.arange(0, BLOCK_HALF)[None, :], [BLOCK_HEADS, BLOCK_HALF])
    low_col, gap = _pairs(col, HALF, PAIRS)
    places = head * (2 * HALF) + low_col
    cosines = angles_ptr + token * PAIRS + col
    sines = cosines + tl.num_programs(0).to(tl.int64) * PAIRS
    qkv_ptr += token * qkv_stride
    if is_q:
        mask = (head < HEADS) & (col < HALF)
        source = qkv_ptr + head * Q_STRIDE + low_col
        low, high = _turned(
            source, q_norm_ptr, cosines, sines, col, low_col, gap, mask, eps, HALF, PAIRS
        )
        target = q_ptr + token * (HEADS * 2 * HALF) + places
        tl.store(target, low, mask=mask)
        tl.store(target + gap, high, mask=mask)
    else:
        location = tl.load(locations_ptr + token)
        mask = (head < tl.where(location < 0, 0, KV_HEADS)) & (col < HALF)
        source = qkv_ptr + HEADS * Q_STRIDE + places
        low, high = _turned(
            source, k_norm_ptr, cosines, sines, col, low_col, gap, mask, eps, HALF, PAIRS
        )
        page, offset = location // PAGE_SIZE, location % PAGE_SIZE
        into = kv_ptr + page * page_stride + offset * offset_stride + head * head_stride + low_col
        tl.store(into, kept(low, k_scale, LARGEST), mask=mask)
        tl.store(into + gap, kept(high, k_scale, LARGEST), mask=mask)
        source += KV_HEADS * 2 * HALF
        into += kv_stride
        tl.store(into, kept(tl.load(source, mask=mask), v_scale, LARGEST), mask=mask)
        tl.store(into + gap, kept(tl.load(source + gap, mask=mask), v_scale, LARGEST), mask=mask)


@triton.jit
def _pairs(col, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Return the indices of the first numbers of a head's HALF pairs, and the distance to the
    second ones.

    PAIRS pairs are rotated. The remaining pairs hold the numbers that are not rotated.
    """
    if PAIRS == HALF:
        return col, HALF
    else:
        turned = col < PAIRS
        return tl.where(turned, col, col + PAIRS), tl.where(turned, PAIRS, HALF - PAIRS)


@triton.jit
def _turned(
    source,
    norm_ptr,
    cosines,
    sines,
    col,
    low_col,
    gap,
    mask,
    eps,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return both numbers of pairs [heads, HALF], normed if there is a weight, then rotated."""
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + gap, mask=mask, other=0.0)
    turned = mask
    if PAIRS != HALF:
        turned = mask & (col < PAIRS)
    cos = tl.load(cosines, mask=turned, other=1.0)
    sin = tl.load(sines, mask=turned, other=0.0)
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if norm_ptr is not None:
        weight_low = tl.load(norm_ptr + low_col, mask=mask, other=0.0)
        weight_high = tl.load(norm_ptr + low_col + gap, mask=mask, other=0.0)
        squares = tl.sum(low * low + high * high, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        low = weighted(low * scale, weight_low).to(dtype).to(tl.float32)
        high = weighted(high * scale, weight_high).to(dtype).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
