"""Paged attention in Triton with split keys (flash-decoding): for rows with one query, for rows
that verify drafts, and for prompts too short to occupy the device. With fixed segments it computes
all rows.

A program computes the tiles of keys that a plan assigns to it. An item (some queries of a row) that
only one program computes is written directly. For other items each program writes a partial result,
and the last program to finish combines them in the order of their keys. The result therefore does
not depend on which program is last. The grid depends only on shapes, so a captured graph is valid
for all lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.attention.arguments import AttentionRows, Scoring
from kernels.attention.split_plan import (
    SplitPlan,
    busy_programs,
    first_tile,
    keys_of_item,
    program_of,
)
from kernels.attention.tiles import (
    LOG2_E,
    as_operand,
    as_part,
    attend_tiles,
    block,
    gated,
    joined,
    score_scales,
    stages_that_fit,
)
from kernels.bound import bound
from kernels.row_search import SEARCH_BLOCK, last_at_most

COMBINE_NUMBERS = 8192  # numbers of partial results read at once: 64 per thread
FULL_TILE_LANES = 64  # from this number on, tiles that all queries see need no mask


def split_attention(
    q: Tensor,
    kv: Tensor,
    rows: AttentionRows,
    plan: SplitPlan,
    out: Tensor,
    scoring: Scoring,
    gate: Tensor | None,
) -> None:
    """Write the outputs of the plan's rows into `out`."""
    num_tokens, heads, key_dim = q.shape
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    group, head_dim = heads // kv_heads, out.shape[1] // heads
    rest = key_dim - head_dim
    tile, block_d = plan.tile, block(head_dim)
    used = int(triton.next_power_of_2(plan.queries * group))
    block_h = min(used, max(1, COMBINE_NUMBERS // block_d))
    last_rows = plan.query_starts is None
    early = early_launch.launches_early()
    score_scale, score_cap = score_scales(scoring.scale, scoring.soft_cap)
    _split_kernel[(plan.num_programs, kv_heads)](
        q,
        kv,
        rows.page_ids,
        rows.page_starts,
        plan.query_starts,
        rows.lengths,
        plan.tile_starts,
        plan.partials,
        plan.logs,
        plan.arrivals,
        out,
        scoring.sinks,
        gate,
        rows.num_rows - plan.num_rows if last_rows else 0,
        num_tokens - plan.num_rows if last_rows else 0,
        plan.num_rows,
        plan.num_items,
        score_scale,
        score_cap,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        GATE_STRIDE=0 if gate is None else gate.stride(0),
        GATE_HEAD_STRIDE=0 if gate is None else gate.stride(1),
        PAGE_STRIDE=kv.stride(0),
        KV_HEAD_STRIDE=kv.stride(1),
        V_STRIDE=kv.stride(2),
        TOKEN_STRIDE=kv.stride(3),
        PAGE_SIZE=page_size,
        GROUP=group,
        QUERIES=plan.queries,
        BLOCK_M=plan.lanes,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        REST=rest,
        BLOCK_REST=block(rest),
        BLOCK_N=tile.keys,
        USED=used,
        BLOCK_H=block_h,
        BLOCK_S=1 if plan.segment else max(1, COMBINE_NUMBERS // (block_h * block_d)),
        MIN_TILES=plan.min_tiles,
        SEGMENT=plan.segment,
        WINDOW=plan.window or 0,
        SEARCH_BLOCK=SEARCH_BLOCK,
        SOFT_CAP=scoring.soft_cap is not None,
        FULL_TILES=plan.lanes >= FULL_TILE_LANES and not plan.window and not plan.segment,
        # With slack, a row's rounding depends on the other rows of its tile.
        SLACK=0 if plan.segment else tile.slack,
        UPCAST=device.INTERPRETED,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
        num_stages=stages_that_fit(
            tile.stages,
            rows=plan.lanes,
            keys=tile.keys,
            head_dim=head_dim,
            rest=rest,
            apart=kv.stride(2) != 0,
            kept=kv.element_size(),
            computed=q.element_size(),
        ),
        maxnreg=tile.registers,
        enable_fp_fusion=True,
    )


@bound
@triton.jit(do_not_specialize=["first_row", "first_query", "num_rows", "num_items"])
def _split_kernel(
    q_ptr,
    kv_ptr,
    page_ids_ptr,
    page_starts_ptr,
    query_starts_ptr,
    lengths_ptr,
    tile_starts_ptr,
    partials_ptr,
    logs_ptr,
    arrivals_ptr,
    out_ptr,
    sinks_ptr,
    gate_ptr,
    first_row,
    first_query,
    num_rows,
    num_items,
    scale,
    soft_cap,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FULL_TILES: tl.constexpr,
    SLACK: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute the tiles of program g of a KV head.

    The partial result of an item that begins in program g has slot num_programs + g. That of an
    item that began in an earlier program has slot g. A program has at most one of each.

    With SEGMENT, a planned tile is a segment of SEGMENT keys, or all keys of an item. Segment t has
    slot 2 * num_programs + t. The sums of an item's keys are in slot g after each segment, and
    their weights in the logs of slot num_programs + g.
    """
    early_launch.start(EARLY)
    program, head = tl.program_id(0), tl.program_id(1)
    num_programs = tl.num_programs(0)
    num_tiles = tl.load(tile_starts_ptr + num_items)
    busy = busy_programs(num_tiles, num_programs, MIN_TILES)
    if program >= busy:
        return
    own_tile = first_tile(program, num_tiles, busy)
    last_tile = first_tile(program + 1, num_tiles, busy)
    tile = own_tile
    done = program * 0  # segments of an item that this program computes alone
    item = last_at_most(tile_starts_ptr, num_items, tile, 1, 0, SEARCH_BLOCK)
    lanes = tl.arange(0, BLOCK_M)
    heads = lanes % GROUP
    dims = tl.arange(0, BLOCK_D)
    q_ptr += head * GROUP * Q_HEAD_STRIDE
    kv_ptr += head.to(tl.int64) * KV_HEAD_STRIDE
    while tile < last_tile:
        item_tile = tl.load(tile_starts_ptr + item)
        item_end = tl.load(tile_starts_ptr + item + 1)
        if SEGMENT:
            stop = tl.minimum(tile + 1, item_end)
            complete = (stop == item_end) & (stop <= item_tile + 1)
        else:
            stop = tl.minimum(item_end, last_tile)
            complete = (item_tile >= own_tile) & (item_end <= last_tile)
        if query_starts_ptr is None:
            row, row_query, num_queries, first = first_row + item, first_query + item, 1, 0
        else:
            row = last_at_most(query_starts_ptr, num_rows, item, QUERIES, 1, SEARCH_BLOCK)
            row_query = tl.load(query_starts_ptr + row)
            num_queries = tl.load(query_starts_ptr + row + 1) - row_query
            first = (item - row_query // QUERIES - row) * QUERIES
        length = tl.load(lengths_ptr + row)
        pages_ptr = page_ids_ptr + tl.load(page_starts_ptr + row)
        queries = first + lanes // GROUP
        used = (lanes < QUERIES * GROUP) & (queries < num_queries)
        inside = used[:, None] & (dims < HEAD_DIM)[None, :]
        q_places = (row_query + queries).to(tl.int64) * Q_STRIDE + heads * Q_HEAD_STRIDE
        q = tl.load(q_ptr + q_places[:, None] + dims[None, :], mask=inside, other=0.0)
        q_rest = q
        if REST:
            others = tl.arange(0, BLOCK_REST)
            beside = used[:, None] & (others < REST)[None, :]
            rest_ptr = q_ptr + HEAD_DIM + q_places[:, None] + others[None, :]
            q_rest = tl.load(rest_ptr, mask=beside, other=0.0)
        q, q_rest = as_operand(q, kv_ptr, True, UPCAST), as_operand(q_rest, kv_ptr, True, UPCAST)
        oldest = length - num_queries + first
        begin, end = keys_of_item(oldest, length, QUERIES, WINDOW)
        if SEGMENT:
            segment = begin // SEGMENT + tile - item_tile + done
            first_key = tl.maximum(segment * SEGMENT, begin // BLOCK_N * BLOCK_N)
            last_key = tl.minimum((segment + stop - tile) * SEGMENT, end)
            ended = ((segment + 1) * SEGMENT >= end) | (stop == tile) | (complete == 0)
            has_sinks = complete & (done == 0)
        else:
            shift = begin // BLOCK_N - item_tile
            first_key, last_key = (tile + shift) * BLOCK_N, (stop + shift) * BLOCK_N
            has_sinks = tile == item_tile
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:  # the item's first part starts as if it had seen that key
            sinks = tl.load(sinks_ptr + head * GROUP + heads, mask=used, other=0.0)
            has_first = total + has_sinks.to(tl.float32)
            top = tl.where(has_first > 0, sinks.to(tl.float32) * LOG2_E, top)
            total = has_first
        if SEGMENT:
            before, weight_before = top, total
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        masked_key = first_key
        if FULL_TILES:  # end of the tiles that all queries see
            masked_key = tl.maximum((oldest + 1) // BLOCK_N * BLOCK_N, first_key)
            masked_key = tl.minimum(masked_key, last_key)
        for part in tl.static_range(0 if FULL_TILES else 1, 2):
            acc, top, total = attend_tiles(
                q,
                q_rest,
                acc,
                top,
                total,
                length - num_queries + queries,
                kv_ptr,
                pages_ptr,
                first_key if part == 0 else masked_key,
                masked_key if part == 0 else last_key,
                begin,
                end,
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
                MASKED=part == 1,
                SLACK=SLACK,
            )
        if SEGMENT:
            slot = (program * tl.num_programs(1) + head).to(tl.int64) * (QUERIES * GROUP)
            sums_ptr = partials_ptr + slot * HEAD_DIM + lanes[:, None] * HEAD_DIM + dims[None, :]
            top_ptr = logs_ptr + slot + lanes
            weight_ptr = top_ptr + num_programs * tl.num_programs(1) * (QUERIES * GROUP)
            part, log = as_part(acc, top, total)
            begun = used & (lanes < tl.where(done > 0, BLOCK_M, 0))
            sums = tl.load(sums_ptr, mask=inside & begun[:, None], other=0.0)
            before = tl.where(begun, tl.load(top_ptr, mask=begun, other=0.0), before)
            weight_before = tl.load(weight_ptr, mask=begun, other=0.0) + weight_before
            sums, top, total = joined(sums, before, weight_before, part[None, :, :], log[None, :])
            acc = sums + 0.0  # the sign of a sum of zeros depends on their number
        acc, log = as_part(acc, top, total)
        row_heads = tl.num_programs(1) * GROUP
        item_out_ptr = out_ptr + head * GROUP * HEAD_DIM
        item_out_ptr += (row_query + first).to(tl.int64) * row_heads * HEAD_DIM
        item_gate_ptr = gate_ptr
        if gate_ptr is not None:
            item_gate_ptr += head * GROUP * GATE_HEAD_STRIDE
            item_gate_ptr += (row_query + first).to(tl.int64) * GATE_STRIDE
        if complete:
            if SEGMENT:
                pending = used & (lanes < tl.where(ended, 0, BLOCK_M))
                tl.store(sums_ptr, sums, mask=inside & pending[:, None])
                tl.store(top_ptr, top, mask=pending)
                tl.store(weight_ptr, total, mask=pending)
                tl.debug_barrier()  # other threads may still read them
                inside = inside & (lanes < tl.where(ended, BLOCK_M, 0))[:, None]
            places = (lanes // GROUP * row_heads + heads) * HEAD_DIM
            if gate_ptr is not None:
                gates = lanes // GROUP * GATE_STRIDE + heads * GATE_HEAD_STRIDE
                gates = item_gate_ptr + gates[:, None] + dims[None, :]
                acc = gated(acc, gates, inside, out_ptr)
            tl.store(item_out_ptr + places[:, None] + dims[None, :], acc, mask=inside)
        else:
            if SEGMENT:
                slot = (2 * num_programs + tile) * tl.num_programs(1) + head
            else:
                slot = tl.where(tile == item_tile, num_programs + program, program)
                slot = head * 2 * num_programs + slot
            slot = slot.to(tl.int64) * (QUERIES * GROUP)
            cells = lanes[:, None] * HEAD_DIM + dims[None, :]
            tl.store(partials_ptr + slot * HEAD_DIM + cells, acc, mask=inside)
            tl.store(logs_ptr + slot + lanes, log, mask=used)
            if SEGMENT:
                first_part = item_tile
                num_parts = item_end - item_tile
            else:
                first_part = program_of(item_tile, num_tiles, busy)
                num_parts = program_of(item_end - 1, num_tiles, busy) - first_part + 1
            arrivals = arrivals_ptr + head * num_items + item
            tl.debug_barrier()  # all stores of this program precede the signal of one thread
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                tl.store(arrivals, 0)  # reset for the next layer
                for first_lane in tl.static_range(0, USED, BLOCK_H):
                    _combine(
                        partials_ptr,
                        logs_ptr,
                        item_out_ptr,
                        item_gate_ptr,
                        sinks_ptr,
                        head,
                        num_programs,
                        first_part,
                        num_parts,
                        num_queries - first,
                        row_heads,
                        first_lane,
                        GATE_STRIDE,
                        GATE_HEAD_STRIDE,
                        GROUP,
                        QUERIES,
                        BLOCK_H,
                        HEAD_DIM,
                        BLOCK_D,
                        BLOCK_S,
                        SEGMENT,
                    )
        if SEGMENT:
            done = tl.where(ended, 0, done + 1)
            tile = tl.where(ended, stop, tile)
            item += (ended & (stop == item_end)).to(tl.int32)
        else:
            tile = stop
            item += 1


@triton.jit
def _combine(
    partials_ptr,
    logs_ptr,
    item_out_ptr,
    item_gate_ptr,
    sinks_ptr,
    head,
    num_programs,
    first_part,
    num_parts,
    num_queries,
    row_heads,
    first_lane,
    GATE_STRIDE: tl.constexpr,
    GATE_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Combine the partial results of some lanes of an item, written by the programs from
    `first_part` on (with SEGMENT: of its segments from there on). Other multiprocessors wrote them,
    so the loads bypass this one's cache."""
    lanes = first_lane + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    used = (lanes < QUERIES * GROUP) & (lanes // GROUP < num_queries)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if (SEGMENT > 0) & (sinks_ptr is not None):  # as if that key had been seen first
        sinks = tl.load(sinks_ptr + head * GROUP + lanes % GROUP, mask=used, other=0.0)
        top = sinks.to(tl.float32) * LOG2_E
        total += 1.0
    for start in range(0, num_parts, BLOCK_S):
        parts = start + tl.arange(0, BLOCK_S)
        if SEGMENT:
            slots = (2 * num_programs + first_part + parts) * tl.num_programs(1) + head
        else:
            slots = head * 2 * num_programs + first_part + parts
            slots += tl.where(parts == 0, num_programs, 0)
        live = (parts < num_parts)[:, None] & used[None, :]
        cells = slots.to(tl.int64)[:, None] * (QUERIES * GROUP) + lanes[None, :]
        logs = tl.load(logs_ptr + cells, mask=live, other=float("-inf"), cache_modifier=".cg")
        partials = tl.load(
            partials_ptr + cells[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc, top, total = joined(acc, top, total, partials, logs)
    places = (lanes // GROUP * row_heads + lanes % GROUP) * HEAD_DIM
    inside = used[:, None] & (dims < HEAD_DIM)[None, :]
    acc, _ = as_part(acc + 0.0 if SEGMENT else acc, top, total)
    if item_gate_ptr is not None:
        gates = lanes // GROUP * GATE_STRIDE + lanes % GROUP * GATE_HEAD_STRIDE
        gates = item_gate_ptr + gates[:, None] + dims[None, :]
        acc = gated(acc, gates, inside, item_out_ptr)
    tl.store(item_out_ptr + places[:, None] + dims[None, :], acc, mask=inside)
