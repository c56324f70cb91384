"""The Triton kernels of `grouped_mlp`."""

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.bound import bound
from kernels.quantised import add_product, matrix_tile
from kernels.row_search import last_at_most

GROUP_BLOCK = 1024  # pairs that an expert's program reads at once
MANY_PAIRS = 64  # pairs per expert on average, from which the larger tile is mostly full
SUM_BLOCK = 1024  # 16 bytes per thread in 16-bit, in 4 warps


class GroupedTile(NamedTuple):
    """The shape and launch parameters of one program of a product.

    All tiles of a dtype have the same depth, and add products in its order. A token's rounding must
    not depend on the number of other tokens, which selects the tile.
    """

    rows: int
    columns: int  # columns of the output, or of gate and up with half of them each
    depth: int
    warps: int
    stages: int


def tile_for(
    element_size: int, num_pairs: int, num_experts: int, architecture: int, group: int
) -> GroupedTile:
    """Return the tile for a number of pairs, which are distributed unevenly among experts.

    A step of few tokens is limited by reading weights: a tile of 64 rows does 64 operations per
    byte, and a GPU could do 150 to 300. With many tokens, twice the rows and columns halve the
    bytes that each operation reads from the L2 cache.

    Args:
        architecture: 90 for compute capability 9.0. On others, the sums of the larger tile would
            not fit registers or shared memory.
        group: inputs that share a scale. 0: there are no scales.
    """
    large = architecture // 10 in (9, 10) and num_pairs >= MANY_PAIRS * num_experts
    if element_size != 2:
        tile = GroupedTile(32, 64, 32, 4, 2)
    else:
        tile = GroupedTile(128, 256, 64, 8, 3) if large else GroupedTile(64, 128, 64, 4, 4)
    if group:
        # Products of a group have their own registers: twice as many columns would spill.
        return tile._replace(
            columns=max(64, tile.columns // 2), depth=min(tile.depth, group & -group)
        )
    return tile


@bound
@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(ids_ptr, starts_ptr, order_ptr, num_pairs, BLOCK: tl.constexpr):
    """Write where each expert's pairs start, and the sorted pair numbers. Pairs without an expert
    are last.

    There is one program per expert. It reads all ids once, and records in a bit mask its pairs
    among the first 32 that a lane reads. Only later ones are read again. An expert's pairs are in
    the order of lanes, so that lanes do not wait for each other between two reads.
    """
    expert = tl.program_id(0)
    # Lanes with adjacent pairs would exchange them before each store.
    lanes = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    earlier, mine, bits = (tl.zeros([BLOCK], tl.int32),) * 3
    num_reads = tl.cdiv(num_pairs, BLOCK)
    for read in range(num_reads):
        pairs = read * BLOCK + lanes
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=0x7FFFFFFF)
        earlier += (ids < expert).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
        bits |= tl.where(ids == expert, tl.where(read < 32, 1 << read, 0), 0)
    first = tl.sum(earlier)
    places = first + tl.cumsum(mine, 0) - mine
    tl.store(starts_ptr + expert, first)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, first + tl.sum(mine))
    for read in range(num_reads):
        pairs = read * BLOCK + lanes
        own = (bits >> read) & 1
        if read >= 32:
            ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=0x7FFFFFFF)
            own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + places, pairs, mask=own > 0)
        places += own


@triton.jit
def _rows_of(starts_ptr, num_experts, BLOCK_M: tl.constexpr, SEARCH_BLOCK: tl.constexpr):
    """Return this program's expert, the first index of its tile among the sorted pairs, and the end
    of the expert's pairs.

    Expert e's tiles are numbered from starts[e] // BLOCK_M + e, which leaves room for one partial
    tile per expert. Surplus numbers have no pairs.
    """
    tile = tl.program_id(0)
    expert = last_at_most(starts_ptr, num_experts, tile, BLOCK_M, 1, SEARCH_BLOCK)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    return expert, start + (tile - start // BLOCK_M - expert) * BLOCK_M, end


@triton.jit
def _tile(ptr, rows, row_ok, cols, num_cols, STRIDE: tl.constexpr, EVEN: tl.constexpr):
    """Load [rows, cols], with zeros for rows that do not exist."""
    places = ptr + rows[:, None].to(tl.int64) * STRIDE + cols[None, :]
    if EVEN:
        return tl.load(places, mask=row_ok[:, None], other=0.0)
    else:
        return tl.load(places, mask=row_ok[:, None] & (cols < num_cols)[None, :], other=0.0)


@bound
@triton.jit
def gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    between_ptr,
    starts_ptr,
    order_ptr,
    num_experts,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute act(gate) * up for a tile of sorted pairs, in float32, rounded once."""
    expert, first, end = _rows_of(starts_ptr, num_experts, BLOCK_M, SEARCH_BLOCK)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_M)
    used = places < end
    tokens = tl.load(order_ptr + places, mask=used, other=0) // K
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = outputs < INNER
    rows = expert * (2 * INNER) + outputs
    gate_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * INNER * (HIDDEN // PACKED))
    up_ptr = gate_ptr + INNER * (HIDDEN // PACKED)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    EVEN: tl.constexpr = HIDDEN % BLOCK_K == 0
    for start in range(0, HIDDEN, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        x = _tile(x_ptr, tokens, used, cols, HIDDEN, HIDDEN, EVEN)
        if UPCAST:
            x = x.to(tl.float32)
        gates = matrix_tile(gate_ptr, outputs, wanted, start, HIDDEN, BLOCK_K, FORMAT, PACKED)
        ups = matrix_tile(up_ptr, outputs, wanted, start, HIDDEN, BLOCK_K, FORMAT, PACKED)
        gate = add_product(gate, x, gates, scales_ptr, zeros_ptr, rows, wanted, start,
                           GROUP, GROUPS, FORMAT)  # fmt: skip
        up = add_product(up, x, ups, scales_ptr, zeros_ptr, rows + INNER, wanted, start,
                         GROUP, GROUPS, FORMAT)  # fmt: skip
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * INNER) + outputs
        gate += tl.load(biases, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + INNER, mask=wanted, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        open_ = tl.sigmoid(gate * SLOPE)
    elif ACTIVATION == "silu":
        open_ = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        open_ = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        open_ = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    out_ptr = between_ptr + places[:, None].to(tl.int64) * INNER + outputs[None, :]
    tl.store(out_ptr, gate * open_ * up, mask=used[:, None] & wanted[None, :])


@bound
@triton.jit
def down_kernel(
    between_ptr,
    down_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    weights_ptr,
    parts_ptr,
    starts_ptr,
    order_ptr,
    num_experts,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute the second product of a tile of sorted pairs, times their weights, stored in the
    original order of pairs."""
    expert, first, end = _rows_of(starts_ptr, num_experts, BLOCK_M, SEARCH_BLOCK)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_M)
    used = places < end
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = outputs < HIDDEN
    matrix_rows = expert * HIDDEN + outputs
    down_ptr += expert.to(tl.int64) * (HIDDEN * (INNER // PACKED))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    EVEN: tl.constexpr = INNER % BLOCK_K == 0
    for start in range(0, INNER, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        rows = _tile(between_ptr, places, used, cols, INNER, INNER, EVEN)
        if UPCAST:
            rows = rows.to(tl.float32)
        matrix = matrix_tile(down_ptr, outputs, wanted, start, INNER, BLOCK_K, FORMAT, PACKED)
        acc = add_product(acc, rows, matrix, scales_ptr, zeros_ptr, matrix_rows, wanted, start,
                          GROUP, GROUPS, FORMAT)  # fmt: skip
    if bias_ptr is not None:
        biases = tl.load(bias_ptr + expert * HIDDEN + outputs, mask=wanted, other=0.0)
        acc += biases.to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + places, mask=used, other=0)
    weights = tl.load(weights_ptr + pairs, mask=used, other=0.0)
    out_ptr = parts_ptr + pairs[:, None].to(tl.int64) * HIDDEN + outputs[None, :]
    tl.store(out_ptr, acc * weights[:, None], mask=used[:, None] & wanted[None, :])


@bound
@triton.jit
def add_pairs_kernel(
    parts_ptr,
    ids_ptr,
    out_ptr,
    num_experts,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the K parts of one token, in order. Parts of pairs without an expert are skipped."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(K):
        pair = row * K + part
        size = tl.where(tl.load(ids_ptr + pair) < num_experts, HIDDEN, 0)
        place = parts_ptr + pair * HIDDEN + cols
        total += tl.load(place, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + cols, total, mask=mask)
