"""Packing of slices of scattered pages (whole pages, or some KV heads) into one contiguous buffer,
and unpacking. Used by kvtransfer.

Small pages then move between a device and host memory in one copy instead of one per page. Ranks
that need only some heads of the other side copy only those.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

_VECTOR_BYTES = 16  # of one load
_BLOCK = 512  # vectors per program: 4 loads per thread of 4 warps, see tools/bench/gpu


def pack_pages(pool: Tensor, pages: Tensor, packed: Tensor, *, offset: int = 0) -> None:
    """Copy packed[i] = pool[pages[i], offset : offset + slice_bytes] for all i.

    Args:
        pool: contiguous uint8 [num_pages, page_bytes]. The KV head is outermost in a page, so that
            some consecutive heads are one range of its bytes.
        pages: contiguous int32 [n] on the pool's device, in range.
        packed: contiguous uint8 [n, slice_bytes] on the pool's device, not overlapping the pool.
        offset: bytes. It, page_bytes, slice_bytes and both addresses are multiples of 16.
    Raises:
        ValueError: wrong shapes, dtypes, alignment or devices, or a slice that leaves the page.
    """
    _check(pool, pages, packed, offset)
    if device.uses_triton(pool):
        _launch(pool, pages, packed, offset, packs=True)
    else:
        pack_pages_reference(pool, pages, packed, offset)


def unpack_pages(packed: Tensor, pool: Tensor, pages: Tensor, *, offset: int = 0) -> None:
    """Copy pool[pages[i], offset : offset + slice_bytes] = packed[i] for all i. Pages are distinct.

    Otherwise like `pack_pages`.
    """
    _check(pool, pages, packed, offset)
    if device.uses_triton(pool):
        _launch(pool, pages, packed, offset, packs=False)
    else:
        unpack_pages_reference(packed, pool, pages, offset)


def _check(pool: Tensor, pages: Tensor, packed: Tensor, offset: int) -> None:
    if pool.ndim != 2 or pool.dtype != torch.uint8 or not pool.is_contiguous():
        raise ValueError(f"pool: contiguous uint8 [n, bytes], got {pool.dtype} {tuple(pool.shape)}")
    if pages.ndim != 1 or pages.dtype != torch.int32 or not pages.is_contiguous():
        raise ValueError(f"pages: contiguous int32 [n], got {pages.dtype} {tuple(pages.shape)}")
    if packed.ndim != 2 or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(f"packed: uint8 [n, bytes], got {packed.dtype} {tuple(packed.shape)}")
    if len(packed) != len(pages):
        raise ValueError(f"{len(pages)} pages do not fit into packed {tuple(packed.shape)}")
    if not 0 <= offset <= offset + packed.shape[1] <= pool.shape[1]:
        raise ValueError(
            f"bytes [{offset}, {offset + packed.shape[1]}) are not within a page of {pool.shape[1]}"
        )
    sizes = (pool.shape[1], packed.shape[1], offset, pool.data_ptr(), packed.data_ptr())
    if any(size % _VECTOR_BYTES for size in sizes):
        raise ValueError(f"sizes and addresses must be multiples of {_VECTOR_BYTES}: {sizes}")
    if not pool.device == pages.device == packed.device:
        raise ValueError(f"one device expected: {pool.device}, {pages.device}, {packed.device}")


def pack_pages_reference(pool: Tensor, pages: Tensor, packed: Tensor, offset: int) -> None:
    torch.index_select(pool.narrow(1, offset, packed.shape[1]), 0, pages, out=packed)


def unpack_pages_reference(packed: Tensor, pool: Tensor, pages: Tensor, offset: int) -> None:
    pool.narrow(1, offset, packed.shape[1]).index_copy_(0, pages.long(), packed)


def _launch(pool: Tensor, pages: Tensor, packed: Tensor, offset: int, *, packs: bool) -> None:
    if not packed.numel():
        return
    slice_vectors = packed.shape[1] // _VECTOR_BYTES
    _page_pack_kernel[(len(pages), triton.cdiv(slice_vectors, _BLOCK))](
        pool.view(torch.int64),
        pages,
        packed.view(torch.int64),
        pool.shape[1] // _VECTOR_BYTES,
        slice_vectors,
        offset // _VECTOR_BYTES,
        packs,
        2 * _BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )


@bound
@triton.jit
def _page_pack_kernel(
    pool_ptr,
    pages_ptr,
    packed_ptr,
    page_vectors,
    slice_vectors,
    offset_vectors,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(pages_ptr + row).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Twice a number of vectors, so that the compiler sees two adjacent words in each.
    mask = word < slice_vectors * 2
    in_pool = pool_ptr + (page * page_vectors + offset_vectors) * 2 + word
    in_packed = packed_ptr + row * slice_vectors * 2 + word
    if PACKS:
        tl.store(in_packed, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_packed, mask=mask), mask=mask)
