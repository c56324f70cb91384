"""Division of a decode step's keys among programs, computed on the device.

The keys of all rows are cut into tiles. Every program gets the same number of consecutive tiles,
across rows. So one long row among short ones keeps the whole device busy. Independent of the
computation on a tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device

# Starting points, to be tuned by tools/bench/gpu.
PROGRAMS_PER_MULTIPROCESSOR = 2  # each with 64 KiB of keys and values in flight
MIN_TILES = 2  # per program: fewer would not pay for their partial results
PLAN_BLOCK = 1024  # rows
LONGEST_HEAD = 256  # of keys that are not latents
# By bytes of a stored number. Without a limit the compiler spills some registers so that more
# programs fit than are launched.
MAX_REGISTERS = {1: 224, 2: 168}


class DecodeTile(NamedTuple):
    """The shape and launch parameters of one program's tile."""

    keys: int
    warps: int = 4
    stages: int = 3  # of the load pipeline, if they fit
    registers: int | None = None  # maximum


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The tiles of keys of each row, and scratch memory that the layers use in turn.

    The rows are the last `num_rows` of a batch, and their queries are its last tokens.
    """

    tile_starts: Tensor  # int32 [num_rows + 1]: row i's tiles are [tile_starts[i], [i + 1])
    partials: Tensor  # float32 [kv_heads, num_programs + num_rows, group, value_dim]
    logs: Tensor  # float32 [kv_heads, num_programs + num_rows, group]
    arrivals: Tensor  # int32 [kv_heads, num_rows], zeros between layers
    num_rows: int
    num_programs: int  # per KV head
    min_tiles: int  # per program
    tile: DecodeTile
    window: int | None


def plan_decode(
    lengths: Tensor,
    kv: Tensor,
    *,
    num_heads: int,
    num_rows: int,
    window: int | None,
    value_dim: int | None = None,
) -> DecodePlan:
    """Plan a decode step. One launch, without waiting for it.

    Args:
        lengths: int32, of all rows of a batch.
    """
    kv_heads, head_dim = kv.shape[1], kv.shape[4]
    tile = _tile(head_dim, kv.element_size())
    multiprocessors = device.num_multiprocessors(kv.device)
    num_programs = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // kv_heads)
    slots = (kv_heads, num_programs + num_rows, num_heads // kv_heads)
    plan = DecodePlan(
        tile_starts=torch.empty(num_rows + 1, dtype=torch.int32, device=kv.device),
        partials=torch.empty(*slots, value_dim or head_dim, dtype=torch.float32, device=kv.device),
        logs=torch.empty(slots, dtype=torch.float32, device=kv.device),
        arrivals=torch.empty(kv_heads, num_rows, dtype=torch.int32, device=kv.device),
        num_rows=num_rows,
        num_programs=num_programs,
        min_tiles=MIN_TILES,
        tile=tile,
        window=window,
    )
    _plan_kernel[(1,)](
        lengths,
        plan.tile_starts,
        plan.arrivals,
        lengths.shape[0] - num_rows,
        num_rows,
        kv_heads,
        window or 0,
        tile.keys,
        PLAN_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return plan


def _tile(head_dim: int, element_size: int) -> DecodeTile:
    """Return a tile with at most 16 KiB of K in half precision, or 36 KiB of latents, which are
    longer."""
    held = max(2, element_size)  # bytes in registers, where narrower numbers are widened
    if head_dim > LONGEST_HEAD:
        return DecodeTile(keys=64 // held, warps=8)
    keys = 64 if head_dim * held <= 256 else 32
    return DecodeTile(keys, registers=MAX_REGISTERS.get(element_size))


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _plan_kernel(
    lengths_ptr,
    tile_starts_ptr,
    arrivals_ptr,
    first_row,
    num_rows,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute tile_starts. A row without keys gets one tile, so that a program writes its zeros."""
    tl.store(tile_starts_ptr, 0)
    total = 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        lengths = tl.load(lengths_ptr + first_row + rows, mask=rows < num_rows, other=0)
        last_tiles = tl.maximum(tl.cdiv(lengths, BLOCK_N), 1)
        tiles = last_tiles - first_key(lengths, WINDOW) // BLOCK_N
        tl.store(tile_starts_ptr + 1 + rows, total + tl.cumsum(tiles), mask=rows < num_rows)
        total += tl.sum(tiles)
    for first in range(0, num_rows * KV_HEADS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(arrivals_ptr + places, 0, mask=places < num_rows * KV_HEADS)


@triton.jit
def first_key(length, WINDOW: tl.constexpr):
    if WINDOW:
        return tl.maximum(length - WINDOW, 0)
    else:
        return length * 0


@triton.jit
def tiles_per_program(total, num_programs, MIN_TILES: tl.constexpr):
    return tl.maximum(tl.cdiv(total, num_programs), MIN_TILES)
