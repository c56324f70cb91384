"""Paged decode attention in Triton, for rows with one query each. The keys are split evenly among
programs.

A program computes the tiles of keys that a plan assigns to it. A row that one program computes
alone is written directly. For other rows each program writes a partial result. The last program to
arrive combines them in the order of their keys, so the result does not depend on which program is
last. The grid depends only on shapes, so a captured graph is valid for all lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.attention.decode_plan import DecodePlan, first_key, tiles_per_program
from kernels.attention.tiles import (
    LOG2_E,
    as_operand,
    attend_tiles,
    block,
    score_scales,
    stages_that_fit,
)
from kernels.row_search import SEARCH_BLOCK, last_at_most

COMBINE_NUMBERS = 8192  # numbers of partial results read at once: 64 per thread


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
    sinks: Tensor | None,
) -> None:
    """Write the outputs of the plan's rows, which are the last of q, into the last rows of
    `out`."""
    num_tokens, heads, key_dim = q.shape
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    group, head_dim = heads // kv_heads, out.shape[1] // heads
    rest = key_dim - head_dim
    tile = plan.tile
    block_g = triton.next_power_of_2(group)
    block_m, block_d = max(16, block_g), block(head_dim)
    block_h = min(block_g, max(1, COMBINE_NUMBERS // block_d))
    first_row = lengths.shape[0] - plan.num_rows
    first_query = num_tokens - plan.num_rows
    early = early_launch.launches_early()
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
        plan.arrivals,
        out,
        sinks,
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
        BLOCK_G=block_g,
        BLOCK_M=block_m,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        REST=rest,
        BLOCK_REST=block(rest),
        BLOCK_N=tile.keys,
        BLOCK_H=block_h,
        BLOCK_S=max(1, COMBINE_NUMBERS // (block_h * block_d)),
        MIN_TILES=plan.min_tiles,
        WINDOW=plan.window or 0,
        SEARCH_BLOCK=SEARCH_BLOCK,
        SOFT_CAP=soft_cap is not None,
        UPCAST=device.INTERPRETED,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
        num_stages=stages_that_fit(
            tile.stages,
            rows=block_m,
            keys=tile.keys,
            head_dim=head_dim,
            rest=rest,
            kept=kv.element_size(),
            computed=q.element_size(),
        ),
        maxnreg=tile.registers,
        enable_fp_fusion=True,
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
    arrivals_ptr,
    out_ptr,
    sinks_ptr,
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
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute program g's tiles of a KV head, which begin at g * per_program.

    The partial result of a row goes into slot g + row. Over the pairs (g, row) that overlap, in
    order, exactly one of the two grows by one, so slots are distinct.
    """
    early_launch.start(EARLY)
    program, head = tl.program_id(0), tl.program_id(1)
    num_slots = tl.num_programs(0) + num_rows
    num_tiles = tl.load(tile_starts_ptr + num_rows)
    per_program = tiles_per_program(num_tiles, tl.num_programs(0), MIN_TILES)
    first_tile = program * per_program
    tile = first_tile
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
        row_end = tl.load(tile_starts_ptr + row + 1)
        stop = tl.minimum(row_end, last_tile)
        length = tl.load(lengths_ptr + first_row + row)
        pages_ptr = page_ids_ptr + tl.load(page_starts_ptr + first_row + row)
        q_places = (first_query + row).to(tl.int64) * Q_STRIDE + heads[:, None] * Q_HEAD_STRIDE
        q = tl.load(q_ptr + q_places + dims[None, :], mask=inside, other=0.0)
        q_rest = q
        if REST:
            others = tl.arange(0, BLOCK_REST)
            beside = (heads < GROUP)[:, None] & (others < REST)[None, :]
            q_rest = tl.load(q_ptr + HEAD_DIM + q_places + others[None, :], mask=beside, other=0.0)
        q, q_rest = as_operand(q, kv_ptr, True, UPCAST), as_operand(q_rest, kv_ptr, True, UPCAST)
        shift = first_key(length, WINDOW) // BLOCK_N - row_tile
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:  # the row's first part starts as if it had seen that key
            sinks = tl.load(sinks_ptr + head * GROUP + heads, mask=heads < GROUP, other=0.0)
            has_first = total + (tile == row_tile).to(tl.float32)
            top = tl.where(has_first > 0, sinks.to(tl.float32) * LOG2_E, top)
            total = has_first
        acc, top, total = attend_tiles(
            q,
            q_rest,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            top,
            total,
            tl.zeros([BLOCK_M], tl.int32) + length - 1,
            kv_ptr,
            pages_ptr,
            (tile + shift) * BLOCK_N,
            (stop + shift) * BLOCK_N,
            first_key(length, WINDOW),
            length,
            scale,
            soft_cap,
            PAGE_STRIDE=PAGE_STRIDE,
            V_STRIDE=V_STRIDE,
            TOKEN_STRIDE=TOKEN_STRIDE,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            REST=REST,
            BLOCK_REST=BLOCK_REST,
            BLOCK_N=BLOCK_N,
            WINDOW=WINDOW,
            SOFT_CAP=SOFT_CAP,
            MASKED=True,
            SLACK=0,
        )
        acc /= tl.maximum(total, 1e-30)[:, None]  # 0 for a row without keys
        out_place = ((first_query + row).to(tl.int64) * tl.num_programs(1) + head) * GROUP
        row_out_ptr = out_ptr + out_place * HEAD_DIM
        if (row_tile >= first_tile) & (row_end <= last_tile):
            tl.store(row_out_ptr + cells, acc, mask=inside)
        else:
            slot = (head * num_slots + program + row).to(tl.int64) * GROUP
            tl.store(partials_ptr + slot * HEAD_DIM + cells, acc, mask=inside)
            tl.store(logs_ptr + slot + heads, top + tl.log2(total), mask=heads < GROUP)
            first = row_tile // per_program
            num_parts = (row_end - 1) // per_program - first + 1
            arrivals = arrivals_ptr + head * num_rows + row
            tl.debug_barrier()  # all stores of this program come before the signal of one thread
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                tl.store(arrivals, 0)  # for the next layer
                for first_head in tl.static_range(0, BLOCK_G, BLOCK_H):
                    _combine(
                        partials_ptr,
                        logs_ptr,
                        row_out_ptr,
                        (head * num_slots + first + row).to(tl.int64),
                        num_parts,
                        first_head,
                        GROUP,
                        BLOCK_H,
                        HEAD_DIM,
                        BLOCK_D,
                        BLOCK_S,
                    )
        tile = stop
        row += 1


@triton.jit
def _combine(
    partials_ptr,
    logs_ptr,
    row_out_ptr,
    slot,
    num_parts,
    first_head,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Combine the partial results of some heads of a row, in the slots from `slot` on. Other
    multiprocessors wrote them, so the loads bypass this one's cache."""
    heads = first_head + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        parts = start + tl.arange(0, BLOCK_S)
        live = (parts < num_parts)[:, None]
        cells = (slot + parts)[:, None] * GROUP + tl.minimum(heads, GROUP - 1)[None, :]
        logs = tl.load(logs_ptr + cells, mask=live, other=float("-inf"), cache_modifier=".cg")
        partials = tl.load(
            partials_ptr + cells[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(logs, 0))
        weights = tl.exp2(logs - new_top[None, :])
        fade = tl.exp2(top - new_top)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * partials, 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    inside = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    cells = heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(row_out_ptr + cells, acc / total[:, None], mask=inside)
