"""Low-rank products of LoRA adapters, y += B A x, with one pair of matrices per slot.

Tokens are grouped by slot, so that each pair is read once for many tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.layers.linear import linear

TILE_ROWS = 32  # tokens of one slot per program
MAX_PARTS = 4  # maximum in one matrix, over all families
LEAST_RANK = 16  # minimum for tensor cores


@dataclass(frozen=True, slots=True, eq=False)
class TokensBySlot:
    """The tokens of a step, grouped by adapter slot.

    Attributes:
        order: int32 [any], token indices. Tokens of one slot are adjacent.
        tiles: int32 [any, 3]: (slot, first, end), a range in `order` of at most TILE_ROWS tokens of
            the slot. Tiles of a slot are adjacent. Tiles without tokens may follow.
    """

    order: Tensor
    tiles: Tensor

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (slot, first, end) with all tokens of a slot in one range. Waits for the device."""
        for slot, tiles in groupby(self.tiles.tolist(), key=itemgetter(0)):
            ranges = [(first, end) for _, first, end in tiles if first < end]
            if ranges:
                yield slot, ranges[0][0], ranges[-1][1]


def add_low_rank(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, tokens: TokensBySlot, parts: Sequence[int]
) -> None:
    """Compute y[token] += up[slot] (down[slot] x[token]), with separate matrices for each part of
    y.

    The product with `down` is rounded to x's dtype. Does not wait for the device. A token's sum
    does not depend on the other tokens in its tile.

    Args:
        y: contiguous [n, out], changed in place.
        x: [n, in], of y's dtype, rows contiguous.
        down: contiguous [slots, parts * rank, in] of y's dtype, part after part. rank is a power of
            two, at least LEAST_RANK.
        up: contiguous [slots, out, rank] of y's dtype.
        parts: columns of y in each part, at most MAX_PARTS parts.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    num_slots, out, rank = up.shape
    if rank < LEAST_RANK or rank & (rank - 1):
        raise ValueError(f"rank: a power of two of at least {LEAST_RANK}, got {rank}")
    if not 1 <= len(parts) <= MAX_PARTS or sum(parts) != out:
        raise ValueError(f"parts {tuple(parts)} do not make {out} columns")
    if down.shape != (num_slots, len(parts) * rank, x.shape[1]):
        raise ValueError(
            f"down {tuple(down.shape)} does not fit up {tuple(up.shape)} and x {tuple(x.shape)}"
        )
    if y.shape != (x.shape[0], out):
        raise ValueError(f"y [{x.shape[0]}, {out}] expected, got {tuple(y.shape)}")
    if not x.dtype == y.dtype == down.dtype == up.dtype:
        raise ValueError(f"{y.dtype}, {x.dtype}, {down.dtype} and {up.dtype} are not one dtype")
    if not (y.is_contiguous() and down.is_contiguous() and up.is_contiguous()):
        raise ValueError("y, down and up must be contiguous")
    if x.stride(1) != 1:
        raise ValueError("x must have contiguous rows")
    implementation = add_low_rank_triton if device.uses_triton(x) else add_low_rank_reference
    implementation(y, x, down, up, tokens, parts)


def add_low_rank_reference(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, tokens: TokensBySlot, parts: Sequence[int]
) -> None:
    rank = up.shape[2]
    for slot, start, end in tokens.spans():
        mine = tokens.order[start:end]
        inner = linear(x.index_select(0, mine), down[slot])
        for part, (first, past) in enumerate(_ranges(parts)):
            columns = slice(part * rank, (part + 1) * rank)
            added = linear(inner[:, columns], up[slot, first:past])
            y[:, first:past].index_add_(0, mine, added)


def add_low_rank_triton(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, tokens: TokensBySlot, parts: Sequence[int]
) -> None:
    (_, width, inputs), rank = down.shape, up.shape[2]
    num_tiles, num_tokens = tokens.tiles.shape[0], tokens.order.shape[0]
    if not num_tiles:
        return
    inner = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    columns = 32 if width % 32 == 0 else 16
    _down_kernel[(num_tiles, width // columns)](
        x,
        down,
        inner,
        tokens.order,
        tokens.tiles,
        x.stride(0),
        INPUTS=inputs,
        WIDTH=width,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=columns,
        BLOCK_K=64,
        UPCAST=device.INTERPRETED,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    ends = [past for _, past in _ranges(parts)]
    ends += [ends[-1]] * (MAX_PARTS - len(ends))
    _up_kernel[(num_tiles, triton.cdiv(max(parts), 128), len(parts))](
        y,
        up,
        inner,
        tokens.order,
        tokens.tiles,
        OUTPUTS=y.shape[1],
        WIDTH=width,
        RANK=rank,
        END_0=ends[0],
        END_1=ends[1],
        END_2=ends[2],
        END_3=ends[3],
        BLOCK_M=TILE_ROWS,
        BLOCK_N=128,
        BLOCK_K=min(rank, 64),
        UPCAST=device.INTERPRETED,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )


def _ranges(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for size in parts:
        yield first, first + size
        first += size


@bound
@triton.jit
def _down_kernel(
    x_ptr,
    down_ptr,
    inner_ptr,
    order_ptr,
    tiles_ptr,
    x_stride,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply a tile's tokens by some rows of its slot's `down`. Results are stored in `order`."""
    tile = tiles_ptr + tl.program_id(0) * 3
    slot, first, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_M)
    used = places < end
    tokens = tl.load(order_ptr + places, mask=used, other=0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    down_ptr += slot.to(tl.int64) * (WIDTH * INPUTS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        there = (cols < INPUTS)[None, :]
        x = tl.load(
            x_ptr + tokens[:, None] * x_stride + cols[None, :],
            mask=used[:, None] & there,
            other=0.0,
        )
        matrix = tl.load(down_ptr + rows[:, None] * INPUTS + cols[None, :], mask=there, other=0.0)
        if UPCAST:
            x, matrix = x.to(tl.float32), matrix.to(tl.float32)
        acc = tl.dot(x, tl.trans(matrix), acc, input_precision="ieee")
    out_ptr = inner_ptr + places[:, None].to(tl.int64) * WIDTH + rows[None, :]
    tl.store(out_ptr, acc, mask=used[:, None])


@bound
@triton.jit
def _up_kernel(
    y_ptr,
    up_ptr,
    inner_ptr,
    order_ptr,
    tiles_ptr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    END_3: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the second product to some columns of a part of y. No two programs write one element."""
    tile, part = tiles_ptr + tl.program_id(0) * 3, tl.program_id(2)
    begin = tl.where(part < 2, tl.where(part == 0, 0, END_0), tl.where(part == 2, END_1, END_2))
    past = tl.where(part < 2, tl.where(part == 0, END_0, END_1), tl.where(part == 2, END_2, END_3))
    cols = begin + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = cols < past
    slot, first, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_M)
    used = places < end
    up_ptr += slot.to(tl.int64) * (OUTPUTS * RANK)
    inner_ptr += part * RANK
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        ranks = start + tl.arange(0, BLOCK_K)
        inner = tl.load(
            inner_ptr + places[:, None].to(tl.int64) * WIDTH + ranks[None, :],
            mask=used[:, None],
            other=0.0,
        )
        matrix = tl.load(
            up_ptr + cols[:, None] * RANK + ranks[None, :], mask=wanted[:, None], other=0.0
        )
        if UPCAST:
            inner, matrix = inner.to(tl.float32), matrix.to(tl.float32)
        acc = tl.dot(inner, tl.trans(matrix), acc, input_precision="ieee")
    tokens = tl.load(order_ptr + places, mask=used, other=0).to(tl.int64)
    out_ptr = y_ptr + tokens[:, None] * OUTPUTS + cols[None, :]
    there = used[:, None] & wanted[None, :]
    y = tl.load(out_ptr, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr, y + acc, mask=there)
