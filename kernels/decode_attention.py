"""Paged attention of rows with one query each, by Triton: split over the keys, evenly.

A program computes the tiles of keys that a plan gives it and leaves one partial result per row it
meets; a second kernel combines those of each row. The grids depend on shapes alone: a captured
graph is right for all lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.attention_tiles import SEARCH_BLOCK, attend_tiles, last_at_most, score_scales
from kernels.decode_plan import DecodePlan, first_key, tiles_per_program

MAX_REGISTERS = 168  # or the compiler spills some so that more programs fit than are launched
COMBINE_BLOCK = 16  # partial results at once


def decode_attention(
    q: Tensor,
    kv: Tensor,
    page_ids: Tensor,
    page_starts: Tensor,
    lengths: Tensor,
    plan: DecodePlan,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Writes the outputs of the plan's rows, the last of q's, into the last rows of `out`."""
    num_tokens, heads, head_dim = q.shape
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    first_row = lengths.shape[0] - plan.num_rows
    first_query = num_tokens - plan.num_rows
    score_scale, score_cap = score_scales(scale, soft_cap)
    _decode_kernel[(plan.num_programs, kv_heads)](
        q,
        kv,
        page_ids,
        page_starts,
        lengths,
        plan.tile_starts,
        plan.partials,
        plan.logs,
        first_row,
        first_query,
        plan.num_rows,
        score_scale,
        score_cap,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        PAGE_STRIDE=kv.stride(0),
        KV_HEAD_STRIDE=kv.stride(1),
        V_STRIDE=kv.stride(2),
        TOKEN_STRIDE=kv.stride(3),
        PAGE_SIZE=page_size,
        GROUP=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=plan.block,
        MIN_TILES=plan.min_tiles,
        WINDOW=plan.window or 0,
        SEARCH_BLOCK=SEARCH_BLOCK,
        SOFT_CAP=soft_cap is not None,
        UPCAST=device.INTERPRETED,
        num_warps=4,
        num_stages=3,
        maxnreg=MAX_REGISTERS if kv.element_size() == 2 else None,
    )
    _combine_kernel[(plan.num_rows, heads)](
        plan.tile_starts,
        plan.partials,
        plan.logs,
        out,
        first_query,
        plan.num_rows,
        NUM_PROGRAMS=plan.num_programs,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=COMBINE_BLOCK,
        MIN_TILES=plan.min_tiles,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first_row", "first_query", "num_rows"])
def _decode_kernel(
    q_ptr,
    kv_ptr,
    page_ids_ptr,
    page_starts_ptr,
    lengths_ptr,
    tile_starts_ptr,
    partials_ptr,
    logs_ptr,
    first_row,
    first_query,
    num_rows,
    scale,
    soft_cap,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program g of a KV head has the tiles from g * per_program on. What it finds for a row goes
    into slot g + row: along the pairs (g, row) that meet, in order, one of the two grows by one."""
    program, head = tl.program_id(0), tl.program_id(1)
    num_slots = tl.num_programs(0) + num_rows
    num_tiles = tl.load(tile_starts_ptr + num_rows)
    per_program = tiles_per_program(num_tiles, tl.num_programs(0), MIN_TILES)
    tile = program * per_program
    last_tile = tl.minimum(tile + per_program, num_tiles)
    if tile >= last_tile:
        return
    row = last_at_most(tile_starts_ptr, num_rows, tile, 1, 0, SEARCH_BLOCK)
    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    cells = heads[:, None] * HEAD_DIM + dims[None, :]
    inside = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptr += head * GROUP * Q_HEAD_STRIDE
    kv_ptr += head.to(tl.int64) * KV_HEAD_STRIDE
    while tile < last_tile:
        row_tile = tl.load(tile_starts_ptr + row)
        stop = tl.minimum(tl.load(tile_starts_ptr + row + 1), last_tile)
        length = tl.load(lengths_ptr + first_row + row)
        pages_ptr = page_ids_ptr + tl.load(page_starts_ptr + first_row + row)
        q_places = (first_query + row).to(tl.int64) * Q_STRIDE + heads[:, None] * Q_HEAD_STRIDE
        q = tl.load(q_ptr + q_places + dims[None, :], mask=inside, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        shift = first_key(length, WINDOW) // BLOCK_N - row_tile
        acc, top, total = attend_tiles(
            q,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M], tl.int32) + length - 1,
            kv_ptr,
            pages_ptr,
            (tile + shift) * BLOCK_N,
            (stop + shift) * BLOCK_N,
            length,
            scale,
            soft_cap,
            PAGE_STRIDE=PAGE_STRIDE,
            V_STRIDE=V_STRIDE,
            TOKEN_STRIDE=TOKEN_STRIDE,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
            WINDOW=WINDOW,
            SOFT_CAP=SOFT_CAP,
            MASKED=True,
            UPCAST=UPCAST,
        )
        total = tl.maximum(total, 1e-30)  # 0 of a row without keys, whose slot nobody reads
        slot = (head * num_slots + program + row).to(tl.int64) * GROUP
        tl.store(partials_ptr + slot * HEAD_DIM + cells, acc / total[:, None], mask=inside)
        tl.store(logs_ptr + slot + heads, top + tl.log2(total), mask=heads < GROUP)
        tile = stop
        row += 1


@triton.jit(do_not_specialize=["first_query", "num_rows"])
def _combine_kernel(
    tile_starts_ptr,
    partials_ptr,
    logs_ptr,
    out_ptr,
    first_query,
    num_rows,
    NUM_PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """One program per row and query head. A row without keys has no slots and becomes 0."""
    row, head = tl.program_id(0), tl.program_id(1)
    per_program = tiles_per_program(tl.load(tile_starts_ptr + num_rows), NUM_PROGRAMS, MIN_TILES)
    first_tile = tl.load(tile_starts_ptr + row)
    last_tile = tl.load(tile_starts_ptr + row + 1)
    first = row + first_tile // per_program
    last = row + tl.cdiv(last_tile, per_program)
    if first_tile == last_tile:
        last = first
    dims = tl.arange(0, BLOCK_D)
    places = (head // GROUP) * (NUM_PROGRAMS + num_rows).to(tl.int64)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(first, last, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        cells = (places + slots) * GROUP + head % GROUP
        logs = tl.load(logs_ptr + cells, mask=slots < last, other=float("-inf"))
        mask = (slots < last)[:, None] & (dims < HEAD_DIM)[None, :]
        partials = tl.load(
            partials_ptr + cells[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
        )
        new_top = tl.maximum(top, tl.max(logs))
        weights = tl.exp2(logs - new_top)
        fade = tl.exp2(top - new_top)
        acc = acc * fade + tl.sum(weights[:, None] * partials, 0)
        total = total * fade + tl.sum(weights)
        top = new_top
    if total > 0:
        acc /= total
    place = (first_query + row).to(tl.int64) * tl.num_programs(1) + head
    tl.store(out_ptr + place * HEAD_DIM + dims, acc, mask=dims < HEAD_DIM)
