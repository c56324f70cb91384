"""The write of K and V into their pages without rotation, for models that rotate them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.narrow import UNSCALED, KVScales, as_stored, kept, largest, may_keep, narrowed

BLOCK = 1024  # elements per program


def store_kv(
    k: Tensor, v: Tensor, kv: Tensor, locations: Tensor, scales: KVScales = UNSCALED
) -> None:
    """Write K and V of each token to its location, padded with zeros if heads are smaller than the
    pool's.

    Args:
        k, v: [num_tokens, kv_heads, d] of one dtype, each with its own d, any strides but the last,
            which is 1.
        kv: one layer of the pool, [num_pages, kv_heads, 2, page_size, head_dim] of k's dtype or a
            narrow one, head_dim at least k's and v's, any strides but the last, which is 1. Written
            in place.
        locations: contiguous int64 [num_tokens], page * page_size + offset, all distinct. -1: K and
            V of this token are not written.
        scales: divisors of K and V in a narrow dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if kv.ndim != 5 or kv.shape[2] != 2 or kv.stride(4) != 1:
        raise ValueError(f"kv: [pages, kv_heads, 2, page_size, head_dim], got {tuple(kv.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[1] != kv.shape[1] or x.shape[2] > kv.shape[4]:
            raise ValueError(f"{name} {tuple(x.shape)} does not fit kv {tuple(kv.shape)}")
        if not may_keep(kv.dtype, x.dtype) or x.stride(2) != 1:
            raise ValueError(f"{name} {x.dtype} {x.stride()} does not fit kv {kv.dtype}")
    if not k.shape[:1] == v.shape[:1] == locations.shape or locations.dtype != torch.int64:
        raise ValueError(f"locations: int64 [{len(k)}] expected, got {tuple(locations.shape)}")
    store = store_kv_triton if device.uses_triton(kv) else store_kv_reference
    store(k, v, kv, locations, scales)


def store_kv_reference(
    k: Tensor, v: Tensor, kv: Tensor, locations: Tensor, scales: KVScales = UNSCALED
) -> None:
    page_size, head_dim = kv.shape[3:]
    live = locations >= 0
    if not bool(live.all()):
        locations, k, v = locations[live], k[live], v[live]
    by_token = as_stored(kv).permute(0, 3, 2, 1, 4)  # [num_pages, page_size, 2, kv_heads, head_dim]
    pages, offsets = locations // page_size, locations % page_size
    for half, (x, scale) in enumerate(((k, scales.key), (v, scales.value))):
        padded = torch.nn.functional.pad(x, (0, head_dim - x.shape[2]))
        by_token[pages, offsets, half] = as_stored(narrowed(padded, scale, kv.dtype))


def store_kv_triton(
    k: Tensor, v: Tensor, kv: Tensor, locations: Tensor, scales: KVScales = UNSCALED
) -> None:
    num_tokens, kv_heads, page_size, head_dim = k.shape[0], kv.shape[1], kv.shape[3], kv.shape[4]
    if not num_tokens:
        return
    block = triton.next_power_of_2(head_dim)
    block_heads = max(1, BLOCK // block)
    _store_kv_kernel[(num_tokens, triton.cdiv(kv_heads, block_heads), 2)](
        k,
        v,
        kv,
        locations,
        *k.stride()[:2],
        *v.stride()[:2],
        *kv.stride()[:4],
        scales.key,
        scales.value,
        kv_heads,
        page_size,
        k.shape[2],
        v.shape[2],
        head_dim,
        block_heads,
        block,
        largest(kv.dtype),
        num_warps=4,
        enable_fp_fusion=True,
    )


@bound
@triton.jit(do_not_specialize=["locations_ptr"])
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    locations_ptr,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    page_stride,
    head_stride,
    kv_stride,
    offset_stride,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store one block of heads of K or V of one token."""
    token = tl.program_id(0).to(tl.int64)
    is_v = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    col = tl.arange(0, BLOCK_DIM)[None, :]
    location = tl.load(locations_ptr + token)
    mask = (head < tl.where(location < 0, 0, KV_HEADS)) & (col < HEAD_DIM)
    if is_v:
        source = v_ptr + token * v_stride + head * v_head_stride + col
        values = kept(tl.load(source, mask=mask & (col < V_DIM), other=0.0), v_scale, LARGEST)
    else:
        source = k_ptr + token * k_stride + head * k_head_stride + col
        values = kept(tl.load(source, mask=mask & (col < K_DIM), other=0.0), k_scale, LARGEST)
    page, offset = location // PAGE_SIZE, location % PAGE_SIZE
    target = kv_ptr + page * page_stride + offset * offset_stride + head * head_stride + col
    tl.store(target + is_v * kv_stride, values, mask=mask)
