"""Paged extend attention in Triton, for rows with many queries, in one pass over the keys.

A tile has consecutive queries of a row with all query heads of a KV head. K and V are read once for
all of them, and even a short extend fills a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.attention.arguments import AttentionRows, Scoring
from kernels.attention.split_plan import LONGEST_HEAD
from kernels.attention.tiles import (
    LOG2_E,
    OLDER_TRITON,
    as_operand,
    attend_tiles,
    block,
    gated,
    score_scales,
    stages_that_fit,
)
from kernels.bound import bound
from kernels.row_search import SEARCH_BLOCK, last_at_most


class AttentionTile(NamedTuple):
    """The shape and launch parameters of one program's tile."""

    rows: int  # queries times the query heads per KV head
    keys: int
    warps: int
    stages: int  # stages of the load pipeline, if they fit
    slack: int  # see `attend_tiles`


def extend_attention(
    q: Tensor,
    kv: Tensor,
    rows: AttentionRows,
    out: Tensor,
    window: int | None,
    scoring: Scoring,
    gate: Tensor | None,
) -> None:
    """Write the outputs of the rows before the decode rows into `out`.

    Args:
        kv: as in `paged_attention`. Keys may be longer than values: key and value are then
            `kv.stride(2)` numbers apart, and the further numbers of a key follow with stride 1.
        out: [num_tokens, heads * value_dim], rows may be strided.
    Raises:
        ValueError: a KV head has more query heads than a tile has rows.
    """
    heads, key_dim = q.shape[1:]
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    group, head_dim = heads // kv_heads, out.shape[1] // heads
    rest, apart = key_dim - head_dim, kv.stride(2) != 0  # a value is part of its latent
    masked, widened = bool(window or scoring.soft_cap), kv.element_size() < q.element_size()
    tile = _tile(
        head_dim if apart else key_dim,
        q.element_size(),
        device.architecture(),
        masked=masked,
        widened=widened,
        gated=gate is not None,
        longer_keys=rest > 0,
    )
    if group > tile.rows:
        raise ValueError(f"at most {tile.rows} query heads to a KV head, got {group}")
    early = early_launch.launches_early()
    score_scale, score_cap = score_scales(scoring.scale, scoring.soft_cap)
    # Each row's last tile may be partial.
    num_tiles = rows.num_queries // (tile.rows // group) + rows.num_extends
    _extend_kernel[(num_tiles, kv_heads)](
        q,
        kv,
        rows.page_ids,
        rows.page_starts,
        rows.query_starts,
        rows.lengths,
        out,
        scoring.sinks,
        gate,
        rows.num_extends,
        score_scale,
        score_cap,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        OUT_STRIDE=out.stride(0),
        GATE_STRIDE=0 if gate is None else gate.stride(0),
        GATE_HEAD_STRIDE=0 if gate is None else gate.stride(1),
        PAGE_STRIDE=kv.stride(0),
        KV_HEAD_STRIDE=kv.stride(1),
        V_STRIDE=kv.stride(2),
        TOKEN_STRIDE=kv.stride(3),
        PAGE_SIZE=page_size,
        GROUP=group,
        BLOCK_M=tile.rows,
        HEAD_DIM=head_dim,
        BLOCK_D=block(head_dim),
        REST=rest,
        BLOCK_REST=block(rest),
        BLOCK_N=tile.keys,
        WINDOW=window or 0,
        SEARCH_BLOCK=SEARCH_BLOCK,
        SOFT_CAP=scoring.soft_cap is not None,
        SLACK=tile.slack,
        UPCAST=device.INTERPRETED,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
        num_stages=stages_that_fit(
            tile.stages,
            rows=tile.rows,
            keys=tile.keys,
            head_dim=head_dim,
            rest=rest,
            apart=apart,
            kept=kv.element_size(),
            computed=q.element_size(),
        ),
        enable_fp_fusion=True,
    )


def _tile(
    head_dim: int,
    element_size: int,
    architecture: int,
    *,
    masked: bool,
    widened: bool,
    gated: bool,
    longer_keys: bool,
) -> AttentionTile:
    """Return a tile. The numbers derive from instruction counts and should be tuned with
    tools/bench/gpu.

    Args:
        architecture: 90 for compute capability 9.0. From then on, data center GPUs multiply
            operands in shared memory. Other GPUs need more registers, and some have 100 KiB of
            shared memory.
        masked: scores have a window or a cap, which needs registers.
        widened: keys and values are narrower than queries, which needs registers.
        gated: outputs have gates, which need registers if sums are copied to registers at the end.
        longer_keys: keys are longer than values. Before Triton 3.9 that needs registers.
    """
    older = device.OLDER_TRITON
    if head_dim > LONGEST_HEAD:
        if element_size == 2 and not widened and architecture // 10 == 9:
            return AttentionTile(64, 64, 8, 2, 8)
        rows = 32 // element_size if widened else 64 // element_size
        return AttentionTile(rows, rows, 8, 3, slack=0)
    if element_size > 2:
        return AttentionTile(32, 16, 8, 2, slack=0)
    slack = 8 if architecture < 100 else 0  # later GPUs keep sums outside registers
    if architecture // 10 in (9, 10):
        if head_dim > 128:  # widening uses the registers that slack needs
            rows = 64 if gated and architecture >= 100 else 128
            return AttentionTile(rows, 32, 8, 3, 0 if widened or (gated and older) else slack)
        # With masked scores the larger tile would spill registers. With narrower heads no second
        # program would fit on the multiprocessor.
        large = head_dim > 64 and not masked
        if architecture >= 100 and longer_keys and older:
            large = False
        return (
            AttentionTile(128, 128, 8, 2, slack) if large else AttentionTile(128, 64, 8, 3, slack)
        )
    if head_dim > 128:
        return AttentionTile(64, 32, 8, 2, slack)
    return AttentionTile(128, 16, 8, 3, slack=0) if widened else AttentionTile(128, 32, 8, 3, slack)


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _extend_kernel(
    q_ptr,
    kv_ptr,
    page_ids_ptr,
    page_starts_ptr,
    query_starts_ptr,
    lengths_ptr,
    out_ptr,
    sinks_ptr,
    gate_ptr,
    num_rows,
    scale,
    soft_cap,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLACK: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one tile of queries.

    Row r's tiles are numbered from query_starts[r] // QUERIES + r, which leaves room for one
    partial tile per row. Surplus numbers have no queries. The last tiles of a row see the most keys
    and start first.
    """
    early_launch.start(EARLY)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = last_at_most(query_starts_ptr, num_rows, tile, QUERIES, 1, SEARCH_BLOCK)
    row_query = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - row_query
    first_query = (tile - row_query // QUERIES - row) * QUERIES
    if first_query >= num_queries:
        return
    length = tl.load(lengths_ptr + row)
    pages_ptr = page_ids_ptr + tl.load(page_starts_ptr + row)

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + lanes // GROUP
    heads = head * GROUP + lanes % GROUP
    used = (lanes < QUERIES * GROUP) & (queries < num_queries)
    inside = used[:, None] & (dims < HEAD_DIM)[None, :]
    places = (row_query + queries).to(tl.int64)
    q_places = places * Q_STRIDE + heads * Q_HEAD_STRIDE
    q = tl.load(q_ptr + q_places[:, None] + dims[None, :], mask=inside, other=0.0)
    q_rest = q
    if REST:
        others = tl.arange(0, BLOCK_REST)
        rest_ptr = q_ptr + HEAD_DIM + q_places[:, None] + others[None, :]
        q_rest = tl.load(rest_ptr, mask=used[:, None] & (others < REST)[None, :], other=0.0)
    # Longer heads would spill registers on sm_90.
    HALF: tl.constexpr = (REST > 0) | (HEAD_DIM <= 128)
    q, q_rest = as_operand(q, kv_ptr, HALF, UPCAST), as_operand(q_rest, kv_ptr, HALF, UPCAST)

    newest = length - num_queries + queries
    oldest = length - num_queries + first_query  # position of the tile's first query
    end = tl.minimum(oldest + QUERIES, length)  # end of the keys that the tile's last query sees
    # Keys in [low, end) are visible to some query, keys in [all_low, all_end) to all queries.
    begin = 0
    low = 0
    all_low = 0
    if WINDOW:
        begin = tl.maximum(oldest - WINDOW + 1, 0)
        low = begin // BLOCK_N * BLOCK_N
        all_low = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
    all_end = tl.maximum((oldest + 1) // BLOCK_N * BLOCK_N, all_low)
    kv_ptr += head.to(tl.int64) * KV_HEAD_STRIDE
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # as if that key had been seen first
        top = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        total += 1.0
    for part in tl.static_range(3):
        if part == 0:
            first, last = low, all_low
        elif part == 1:
            first, last = all_low, all_end
        else:
            first, last = all_end, end
        if WINDOW > 0 or part > 0:
            acc, top, total = attend_tiles(
                q,
                q_rest,
                acc,
                top,
                total,
                newest,
                kv_ptr,
                pages_ptr,
                first,
                last,
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
                MASKED=part != 1,
                SLACK=SLACK,
            )
    if OLDER_TRITON and gate_ptr is None:  # otherwise `places` occupies registers during the loops
        places = (tl.load(query_starts_ptr + row, volatile=True) + queries).to(tl.int64)
    out_places = places * OUT_STRIDE + heads * HEAD_DIM
    total = tl.maximum(total, 1e-30)  # 0 for a lane without a query, or a row without keys
    acc /= total[:, None]
    if gate_ptr is not None:
        gate_ptr += places[:, None] * GATE_STRIDE + heads[:, None] * GATE_HEAD_STRIDE
        acc = gated(acc, gate_ptr + dims[None, :], inside, out_ptr)
    tl.store(out_ptr + out_places[:, None] + dims[None, :], acc, mask=inside)
