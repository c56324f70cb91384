"""The plan of attention with split keys: which program computes which keys of a step. Computed on
the device.

Rows are cut into items, which are consecutive queries that one program computes together. The keys
of all items are cut into tiles, and each program gets an equal number of consecutive tiles, across
items. So even one long row keeps the whole device busy.

With fixed segments, an item's keys are cut at multiples of SEGMENT from the row's first key on. Its
parts then do not depend on other rows. A program gets whole segments, or all keys of an item.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.attention.arguments import AttentionKind
from kernels.bound import bound

# Starting points, to be tuned by tools/bench/gpu.
PROGRAMS_PER_MULTIPROCESSOR = 2  # each with 64 KiB of keys and values in flight
MIN_TILES = 2  # per program: with fewer, partial results cost more than the split saves
SEGMENT = 1024  # keys of a fixed segment
# Limit of the partial results of fixed segments. Further rows are not split.
PARTIAL_BYTES = 64 << 20
OCCUPYING_ITEMS = 2  # per program: from this number on, no split is needed
LEAST_LANES = 16  # minimum per item, because products have at least 16 rows
MOST_LANES = 64  # per item of many queries
TENSOR_MEMORY_LANES = 32  # for fixed segments from sm_100 on, where more lanes spill registers
UNSPLIT_LANES = 128  # in a tile of the kernel that does not split keys
PLAN_BLOCK = 1024  # rows with one query each
ITEM_BLOCK = 64  # items of rows with several queries
ROW_BLOCK = 128  # rows compared with these items at once
WIDEST_HEAD = 128  # longest head whose MOST_LANES do not spill registers
MUCH_SHARED_BYTES = 160 << 10  # on data center GPUs. Others have 99 KiB
LONGEST_HEAD = 256  # of keys that are not latents
# By bytes of a stored number. Without a limit, the compiler spills registers to make room for more
# programs than are launched.
MAX_REGISTERS = {1: 224, 2: 168}


class SplitTile(NamedTuple):
    """The shape and launch parameters of one program's tile."""

    keys: int
    warps: int = 4
    stages: int = 3  # stages of the load pipeline, if they fit
    registers: int | None = None  # maximum
    slack: int = 0  # see `attend_tiles`


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """The tiles of keys of each item, and scratch memory that the layers share.

    Attributes:
        query_starts: of the batch, if the rows are its first ones. None: they are its last rows,
            with one query each.
        lanes: queries of an item times the query heads per KV head, a power of two.
        queries: maximum of an item.
        num_programs: programs per KV head.
        segment: keys of a fixed segment, which is then a tile of `tile_starts`. 0: a program
            computes consecutive tiles as one part.
    """

    tile_starts: Tensor  # int32 [num_items + 1]: item i's tiles are [tile_starts[i], [i + 1])
    # float32 [kv_heads, 2 * num_programs, queries * group, value_dim], with fixed segments
    # [2 * num_programs + segments, kv_heads, queries * group, value_dim]
    partials: Tensor
    logs: Tensor  # float32, shaped like partials without the last dimension
    arrivals: Tensor  # int32 [kv_heads, num_items], zeros between layers
    query_starts: Tensor | None
    num_rows: int
    num_items: int
    lanes: int
    queries: int
    num_programs: int
    min_tiles: int  # per program
    tile: SplitTile
    window: int | None
    segment: int


def lanes_of_items(
    num_rows: int,
    num_queries: int,
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    multiprocessors: int,
) -> int | None:
    """Return the lanes of an item of rows with several queries. None: their keys should not be
    split.

    Keys are split if the rows' lanes would on average not fill a tile of the unsplit kernel, or if
    that kernel's programs would leave multiprocessors idle.
    """
    least = _lanes_of_a_query(group)
    most = max(least, MOST_LANES) if element_size <= 2 and head_dim <= WIDEST_HEAD else least
    lanes = num_queries * group
    for fitting in (least, most):
        if lanes <= num_rows * fitting:
            return fitting
    programs = (lanes // UNSPLIT_LANES + num_rows) * kv_heads
    return most if programs < multiprocessors else None


def fixed_lanes(group: int, head_dim: int, element_size: int) -> int:
    """Return the lanes of all items with fixed segments, whatever their number of queries."""
    least = _lanes_of_a_query(group)
    most = MOST_LANES if device.architecture() < 100 else TENSOR_MEMORY_LANES
    return max(least, most) if element_size <= 2 and head_dim <= WIDEST_HEAD else least


def _lanes_of_a_query(group: int) -> int:
    return max(LEAST_LANES, int(triton.next_power_of_2(group)))


def programs_per_head(kv_heads: int, multiprocessors: int) -> int:
    """Return the number of programs of a KV head, which does not depend on lengths."""
    return -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // kv_heads)


def plan_split(
    lengths: Tensor,
    kv: Tensor,
    num_rows: int,
    num_queries: int,
    *,
    kind: AttentionKind,
    lanes: int | None = None,
    query_starts: Tensor | None = None,
    segment: int = 0,
) -> SplitPlan:
    """Plan rows whose keys are split. One launch, without waiting for it.

    Args:
        lengths: int32, of all rows of a batch.
        lanes: of an item. None: those of one query, or with fixed segments those of any item.
        query_starts: int32, of a batch whose first rows are planned. None: its last rows are, with
            one query each.
        segment: keys of a fixed segment. 0: keys are divided evenly.
    """
    kv_heads, head_dim, element_size = kv.shape[1], kv.shape[4], kv.element_size()
    group, size = kind.heads // kv_heads, kind.value_dim or head_dim
    if lanes is None:
        fixed = fixed_lanes(group, head_dim, element_size)
        lanes = fixed if segment else _lanes_of_a_query(group)
    queries, num_items = 1, num_rows
    if query_starts is not None:
        queries = lanes // group
        num_items = num_queries // queries + num_rows  # each row's last item may be partial
    num_programs = programs_per_head(kv_heads, device.num_multiprocessors(kv.device))
    num_slots = 0
    if segment:
        most_slots = PARTIAL_BYTES // (kv_heads * queries * group * size * 4)
        if query_starts is None or num_items < OCCUPYING_ITEMS * num_programs:
            parts = kv.shape[0] * kv.shape[3] // segment + 1  # for a row that has all pages
            num_slots = min(num_items * parts, most_slots)
        else:  # as even as possible, because a program computes consecutive items
            num_programs = max(num_programs, min(num_items, most_slots // 2))
    kept = 2 * num_programs + num_slots
    heads_and_slots = (kept, kv_heads) if segment else (kv_heads, kept)
    slots = (*heads_and_slots, queries * group)
    plan = SplitPlan(
        tile_starts=torch.empty(num_items + 1, dtype=torch.int32, device=kv.device),
        partials=torch.empty(*slots, size, dtype=torch.float32, device=kv.device),
        logs=torch.empty(slots, dtype=torch.float32, device=kv.device),
        arrivals=torch.empty(kv_heads, num_items, dtype=torch.int32, device=kv.device),
        query_starts=query_starts,
        num_rows=num_rows,
        num_items=num_items,
        lanes=lanes,
        queries=queries,
        num_programs=num_programs,
        min_tiles=1 if segment else MIN_TILES,
        tile=_tile(head_dim, element_size, lanes, single=queries == 1 and not segment),
        window=kind.window,
        segment=segment,
    )
    _plan_kernel[(1,)](
        lengths,
        query_starts,
        plan.tile_starts,
        plan.arrivals,
        0 if query_starts is not None else lengths.shape[0] - num_rows,
        num_rows,
        num_items,
        num_slots,
        kv_heads,
        queries,
        kind.window or 0,
        segment or plan.tile.keys,
        segment > 0,
        PLAN_BLOCK if query_starts is None else ITEM_BLOCK,
        ROW_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return plan


def _tile(head_dim: int, element_size: int, lanes: int, *, single: bool) -> SplitTile:
    """Return a tile with at most 16 KiB of K in half precision, or 72 KiB of latents, which are
    longer.

    Args:
        single: an item has one query. Several need more registers.
    """
    held = max(2, element_size)  # bytes in registers, where narrower numbers are widened
    if head_dim > LONGEST_HEAD:
        if element_size == 2 and device.shared_bytes() >= MUCH_SHARED_BYTES:
            slack = 8 if lanes >= MOST_LANES else 0
            return SplitTile(keys=64, warps=8, stages=2, slack=slack)
        # One program fits. Without a limit, registers spill to make room for a second one.
        return SplitTile(keys=64 // held, warps=8, registers=255)
    keys = 64 if head_dim * held <= 256 else 32
    wide = element_size > 2 and head_dim >= WIDEST_HEAD and not single
    many = lanes >= MOST_LANES or (lanes > LEAST_LANES and not single)
    if many or wide:  # 4 warps would spill registers
        return SplitTile(keys, warps=8)
    if not single:
        return SplitTile(keys, registers=255)  # two programs fit, and a lower limit spills
    return SplitTile(keys, registers=MAX_REGISTERS.get(element_size))


@bound
@triton.jit(do_not_specialize=["first_row", "num_rows", "num_items", "num_slots"])
def _plan_kernel(
    lengths_ptr,
    query_starts_ptr,
    tile_starts_ptr,
    arrivals_ptr,
    first_row,
    num_rows,
    num_items,
    num_slots,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Compute tile_starts. An item without keys gets one tile, so that a program writes its zeros.
    An item without queries gets none. With FIXED, an item gets one tile with all its keys if the
    slots are used up."""
    tl.store(tile_starts_ptr, 0)
    total = 0
    wanted = 0
    for first in range(0, num_items, BLOCK):
        items = first + tl.arange(0, BLOCK)
        live = items < num_items
        if query_starts_ptr is None:
            length = tl.load(lengths_ptr + first_row + items, mask=live, other=0)
            begin, end = keys_of_item(length - 1, length, QUERIES, WINDOW)
        else:
            row = tl.zeros([BLOCK], tl.int32) - 1
            for first_of_rows in range(0, num_rows, ROW_BLOCK):
                rows = first_of_rows + tl.arange(0, ROW_BLOCK)
                starts = tl.load(query_starts_ptr + rows, mask=rows < num_rows, other=0)
                numbers = tl.where(rows < num_rows, starts // QUERIES + rows, num_items)
                row += tl.sum((numbers[None, :] <= items[:, None]).to(tl.int32), 1)
            row = tl.minimum(row, num_rows - 1)
            row_query = tl.load(query_starts_ptr + row)
            num_queries = tl.load(query_starts_ptr + row + 1) - row_query
            first_query = (items - row_query // QUERIES - row) * QUERIES
            length = tl.load(lengths_ptr + row)
            begin, end = keys_of_item(length - num_queries + first_query, length, QUERIES, WINDOW)
            live = live & (first_query < num_queries)
        tiles = tl.maximum(tl.cdiv(end, TILE), 1) - begin // TILE
        tiles = tl.where(live, tiles, 0)
        if FIXED:
            fits = wanted + tl.cumsum(tiles) <= num_slots
            wanted += tl.sum(tiles)
            tiles = tl.where(fits, tiles, tl.minimum(tiles, 1))
        tl.store(tile_starts_ptr + 1 + items, total + tl.cumsum(tiles), mask=items < num_items)
        total += tl.sum(tiles)
    for first in range(0, num_items * KV_HEADS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(arrivals_ptr + places, 0, mask=places < num_items * KV_HEADS)


@triton.jit
def keys_of_item(oldest, length, QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key that any query of an item sees, and the end of the keys that its queries
    see.

    Args:
        oldest: position of the item's first query. Negative in a row without keys.
    """
    end = tl.maximum(tl.minimum(oldest + QUERIES, length), 0)
    if WINDOW:
        return tl.maximum(oldest - WINDOW + 1, 0), end
    else:
        return oldest * 0, end


@triton.jit
def busy_programs(num_tiles, num_programs, MIN_TILES: tl.constexpr):
    """Return how many programs get tiles: all, unless each would get fewer than MIN_TILES."""
    return tl.minimum(tl.maximum(num_tiles // MIN_TILES, 1), num_programs)


@triton.jit
def first_tile(program, num_tiles, busy):
    """Return the first tile of a program. Programs differ by one tile at most. Correct for up to
    2 ** 31 / busy tiles, which are hundreds of millions of keys."""
    return program * num_tiles // busy


@triton.jit
def program_of(tile, num_tiles, busy):
    """Return the program that has this tile, the inverse of `first_tile`."""
    return ((tile + 1) * busy - 1) // num_tiles
