"""Norm, RoPE and the write of latents (MLA) into their pages, and the rotation of the queries'
rotated parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.layers.rms_norm import rms_norm_reference, weighted
from kernels.layers.rope import rotate_reference
from kernels.narrow import as_stored, kept, largest, may_keep, narrowed

BLOCK = 1024  # numbers of queries per program


def rope_and_store_latents(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    q: Tensor,
    angles: Tensor,
    latents: Tensor,
    locations: Tensor,
    out: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Norm each token's latent, rotate the part of its key after it, and write both to the token's
    location. Also rotates the corresponding parts of the queries into `out`.

    Source: DeepSeek-V2, 2024, section 2.1. Rounded as in `rope_and_store`.

    Args:
        kv: [num_tokens, value_dim + 2 * pairs], rows may be strided.
        norm: contiguous [value_dim], the weight of an RMSNorm, of kv's dtype.
        q: [num_tokens, heads, 2 * pairs] of kv's dtype, any strides but the last, which is 1.
        angles: contiguous float32 [2, num_tokens, pairs], from `rope_angles`.
        latents: one layer of the pool, [num_pages, 1, 1, page_size, value_dim + 2 * pairs] of kv's
            dtype or a narrow one, any strides but the last. Written in place.
        locations: contiguous int64 [num_tokens], page * page_size + offset, all distinct. -1: this
            token's latent is not written.
        out: shaped like q, written.
        interleaved: numbers 2i and 2i + 1 are rotated together, else i and i + pairs. Either way
            they are stored as numbers i and i + pairs.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if latents.ndim != 5 or latents.shape[1:3] != (1, 1) or latents.stride(4) != 1:
        raise ValueError(f"latents: [pages, 1, 1, page_size, size], got {tuple(latents.shape)}")
    if kv.ndim != 2 or kv.shape[1] != latents.shape[4] or kv.stride(1) != 1:
        raise ValueError(f"kv {tuple(kv.shape)} does not fit latents {tuple(latents.shape)}")
    value_dim, turned = norm.shape[0], kv.shape[1] - norm.shape[0]
    if turned <= 0 or turned % 2 or not norm.is_contiguous():
        raise ValueError(f"norm {tuple(norm.shape)} does not fit kv {tuple(kv.shape)}")
    if angles.shape != (2, len(kv), turned // 2) or not angles.is_contiguous():
        raise ValueError(f"angles: [2, {len(kv)}, {turned // 2}], got {tuple(angles.shape)}")
    for name, x in (("q", q), ("out", out)):
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (len(kv), turned) or x.stride(2) != 1:
            raise ValueError(f"{name}: [{len(kv)}, heads, {turned}], got {tuple(x.shape)}")
    if q.shape != out.shape or {q.dtype, out.dtype} != {kv.dtype}:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} and out {out.dtype} {tuple(out.shape)}")
    if not may_keep(latents.dtype, kv.dtype):
        raise ValueError(f"latents of {latents.dtype} do not keep {kv.dtype}")
    if locations.shape != kv.shape[:1] or locations.dtype != torch.int64:
        raise ValueError(f"locations: int64 [{len(kv)}] expected, got {tuple(locations.shape)}")
    if device.uses_triton(kv):
        _triton(kv, norm, eps, q, angles, latents, locations, out, value_dim, interleaved)
    elif (compiled := device.compiled(kv)) is not None:
        page, places = latents, locations
        if latents.dtype != kv.dtype:
            page, places = kv.new_empty(1, 1, 1, *kv.shape), torch.arange(len(kv))
        compiled.rope_and_store_latents(
            kv, norm, eps, q, angles, page, places, out, interleaved=interleaved
        )
        if page is not latents:
            _write(page[0, 0, 0], latents, locations)
    else:
        _reference(kv, norm, eps, q, angles, latents, locations, out, value_dim, interleaved)


def _reference(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    q: Tensor,
    angles: Tensor,
    latents: Tensor,
    locations: Tensor,
    out: Tensor,
    value_dim: int,
    interleaved: bool,
) -> None:
    def turned(x: Tensor) -> Tensor:
        apart = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if interleaved else x
        return rotate_reference(apart, angles)

    out.copy_(turned(q))
    latent = rms_norm_reference(kv[:, :value_dim], norm, eps)
    key = turned(kv[:, None, value_dim:])[:, 0]
    _write(torch.cat((latent, key), dim=1), latents, locations)


def _write(stored: Tensor, latents: Tensor, locations: Tensor) -> None:
    """Write latents [num_tokens, size] to their locations."""
    page_size = latents.shape[3]
    stored, live = as_stored(narrowed(stored, 1.0, latents.dtype)), locations >= 0
    if not bool(live.all()):
        locations, stored = locations[live], stored[live]
    as_stored(latents)[locations // page_size, 0, 0, locations % page_size] = stored


def _triton(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    q: Tensor,
    angles: Tensor,
    latents: Tensor,
    locations: Tensor,
    out: Tensor,
    value_dim: int,
    interleaved: bool,
) -> None:
    (num_tokens, heads, turned) = q.shape
    if not num_tokens:
        return
    block = triton.next_power_of_2(turned // 2)
    block_heads = max(1, BLOCK // (2 * block))
    _latents_kernel[(num_tokens, 1 + triton.cdiv(heads, block_heads))](
        kv,
        norm,
        q,
        angles,
        latents,
        locations,
        out,
        kv.stride(0),
        *q.stride()[:2],
        *out.stride()[:2],
        latents.stride(0),
        latents.stride(3),
        eps,
        heads,
        latents.shape[3],
        value_dim,
        triton.next_power_of_2(value_dim),
        turned // 2,
        block,
        block_heads,
        largest(latents.dtype),
        interleaved,
        num_warps=2,
        enable_fp_fusion=True,
    )


@bound
@triton.jit(do_not_specialize=["locations_ptr"])
def _latents_kernel(
    kv_ptr,
    norm_ptr,
    q_ptr,
    angles_ptr,
    latents_ptr,
    locations_ptr,
    out_ptr,
    kv_stride,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    page_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Process the latent of one token, or one block of heads of its query."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cosines = angles_ptr + token * PAIRS
    sines = cosines + tl.num_programs(0).to(tl.int64) * PAIRS
    if block == 0:
        location = tl.load(locations_ptr + token)
        live = tl.where(location < 0, 0, VALUE_DIM)
        cols = tl.arange(0, BLOCK_VALUE)
        kv_ptr += token * kv_stride
        x = tl.load(kv_ptr + cols, mask=cols < VALUE_DIM, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / VALUE_DIM + eps)
        weight = tl.load(norm_ptr + cols, mask=cols < VALUE_DIM, other=0.0)
        page, offset = location // PAGE_SIZE, location % PAGE_SIZE
        target = latents_ptr + page * page_stride + offset * token_stride
        latent = weighted(wide * scale, weight).to(x.dtype)
        tl.store(target + cols, kept(latent, 1.0, LARGEST), mask=cols < live)
        ends = VALUE_DIM + tl.zeros([1, 1], tl.int64)
        _turn(
            kv_ptr + ends,
            target + ends,
            location + 0 * ends >= 0,  # as wide as the tile, which the interpreter requires
            cosines,
            sines,
            PAIRS,
            BLOCK_PAIRS,
            LARGEST,
            INTERLEAVED,
        )
    else:
        head = ((block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
        _turn(
            q_ptr + token * q_stride + head * q_head_stride,
            out_ptr + token * out_stride + head * out_head_stride,
            head < HEADS,
            cosines,
            sines,
            PAIRS,
            BLOCK_PAIRS,
            0.0,
            INTERLEAVED,
        )


@triton.jit
def _turn(
    source,
    target,
    live,
    cosines,
    sines,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate pairs at source [heads, 1], and store them as i and i + PAIRS of target where live."""
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = live & (pair < PAIRS)
    first = source + (2 * pair if INTERLEAVED else pair)
    low = tl.load(first, mask=mask, other=0.0)
    high = tl.load(first + (1 if INTERLEAVED else PAIRS), mask=mask, other=0.0)
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    cos = tl.load(cosines + pair, mask=pair < PAIRS, other=1.0)
    sin = tl.load(sines + pair, mask=pair < PAIRS, other=0.0)
    turned_low = (low * cos - high * sin).to(dtype)
    turned_high = (high * cos + low * sin).to(dtype)
    tl.store(target + pair, kept(turned_low, 1.0, LARGEST), mask=mask)
    tl.store(target + PAIRS + pair, kept(turned_high, 1.0, LARGEST), mask=mask)
