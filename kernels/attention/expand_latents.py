"""Expansion of paged latents (MLA) to the keys and values of heads in Triton, and attention to
them. Used for prompt chunks on a GPU.

A few heads are expanded at a time, which bounds the memory for their keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.attention.arguments import AttentionRows, Scoring
from kernels.attention.expansion import TILE_TOKENS, ExpandedPlan, LatentExpansion
from kernels.attention.extend import extend_attention
from kernels.attention.tiles import block
from kernels.bound import bound
from kernels.row_search import SEARCH_BLOCK, last_at_most

MUCH_SHARED_BYTES = 160 << 10  # per thread block: enough for steps of 64 numbers of a latent


class ExpandedRows(NamedTuple):
    """Rows of paged latents, cut into tiles of `TILE_TOKENS` tokens for the expansion.

    Attributes:
        page_ids, page_starts, lengths: see `AttentionRows`.
        tile_starts: int32 [num_rows + 1]. Row r has the tiles [tile_starts[r], tile_starts[r + 1]).
    """

    page_ids: Tensor
    page_starts: Tensor
    lengths: Tensor
    tile_starts: Tensor

    @classmethod
    def of(cls, page_ids: Tensor, page_starts: Tensor, lengths: Tensor) -> "ExpandedRows":
        ends = ((lengths + (TILE_TOKENS - 1)) // TILE_TOKENS).cumsum(0, dtype=torch.int32)
        return cls(page_ids, page_starts, lengths, torch.cat((ends.new_zeros(1), ends)))


@dataclass(frozen=True, slots=True, eq=False)
class _TritonPlan:
    """A plan of attention over expanded latents, shared by all layers of a forward.

    Attributes:
        tiles: the same rows for `extend_attention`, which reads a tile as a page. Page ids are 0,
            1, 2, ... The host computes their number without waiting for the device.
        heads_at_once, workspace_bytes: see `LatentExpansion`.
    """

    rows: ExpandedRows
    tiles: AttentionRows
    heads_at_once: int
    workspace_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.tiles.num_tokens

    def attend(
        self, q: Tensor, latents: Tensor, expansion: LatentExpansion, out: Tensor, *, scale: float
    ) -> None:
        (num_tokens, heads, key_dim), value_dim = q.shape, expansion.values.shape[2]
        flat = out.view(num_tokens, heads * value_dim)
        space = q.new_empty(self.workspace_bytes // q.element_size())
        width, num_tiles = key_dim + value_dim, len(self.tiles.page_ids)
        for first in range(0, heads, self.heads_at_once):
            last = min(heads, first + self.heads_at_once)
            shape = (num_tiles, last - first, TILE_TOKENS, width)
            made = space[: num_tiles * (last - first) * TILE_TOKENS * width].view(shape)
            own = LatentExpansion(expansion.keys[first:last], expansion.values[first:last])
            expand_latents(latents, self.rows, own, made)
            extend_attention(
                q[:, first:last],
                _as_pool(made, key_dim),
                self.tiles,
                flat[:, first * value_dim : last * value_dim],
                None,
                Scoring(scale),
                None,
            )


def plan_triton(
    rows: AttentionRows,
    latents: Tensor,
    expansion: LatentExpansion,
    chunks: Sequence[tuple[int, int]],
) -> ExpandedPlan | None:
    """Plan rows without waiting for the device. Returns None if attention over latents is faster,
    or values are longer than keys.

    Args:
        chunks: (queries, tokens) of each row, as known to the host. A row may have fewer tokens.
    """
    _, key_dim, rank = expansion.keys.shape
    rotated = latents.shape[4] - rank
    multiprocessors = device.num_multiprocessors(latents.device)
    if expansion.values.shape[2] > key_dim + rotated or not expansion.pays_on_gpu(
        chunks, rotated=rotated, multiprocessors=multiprocessors
    ):
        return None
    num_tiles = sum(-(-length // TILE_TOKENS) for _, length in chunks)
    queries = sum(queries for queries, _ in chunks)
    latents_of = ExpandedRows.of(rows.page_ids, rows.page_starts, rows.lengths)
    tiles = torch.arange(num_tiles, dtype=torch.int32, device=latents.device)
    return _TritonPlan(
        latents_of,
        AttentionRows(
            tiles, latents_of.tile_starts, rows.query_starts, rows.lengths, queries, num_decodes=0
        ),
        expansion.heads_at_once(chunks, rotated),
        expansion.workspace_bytes(queries, rotated),
    )


def expand_latents(
    latents: Tensor, rows: ExpandedRows, expansion: LatentExpansion, out: Tensor
) -> None:
    """Write the key, the rotated part of the key and the value of each token and head.

    Entries of a tile after the end of its row are arbitrary.

    Args:
        latents: one layer of the pool, [pages, 1, 1, page_size, rank + rotated].
        expansion: of some heads, contiguous.
        out: contiguous [tiles, heads, TILE_TOKENS, key_dim + rotated + value_dim]. It may have
            more tiles than the rows.
    Raises:
        ValueError: wrong shapes or strides.
    """
    (heads, key_dim, rank), value_dim = expansion.keys.shape, expansion.values.shape[2]
    rotated = latents.shape[4] - rank
    expected = (heads, TILE_TOKENS, key_dim + rotated + value_dim)
    if rotated < 1 or latents.shape[1:3] != (1, 1) or latents.stride(4) != 1:
        raise ValueError(f"latents: [pages, 1, 1, page_size, over {rank}], got {latents.shape}")
    if out.shape[1:] != expected or not out.is_contiguous():
        raise ValueError(f"out: [tiles, *{expected}], got {tuple(out.shape)}")
    if not (expansion.keys.is_contiguous() and expansion.values.is_contiguous()):
        raise ValueError("expansion: expected contiguous matrices")
    tile = _tile(block(key_dim) + block(value_dim), out.element_size())
    _expand_kernel[(len(out) * (TILE_TOKENS // tile.tokens), heads)](
        latents,
        rows.page_ids,
        rows.page_starts,
        rows.lengths,
        rows.tile_starts,
        expansion.keys,
        expansion.values,
        out,
        len(rows.lengths),
        PAGE_STRIDE=latents.stride(0),
        TOKEN_STRIDE=latents.stride(3),
        PAGE_SIZE=latents.shape[3],
        RANK=rank,
        BLOCK_RANK=min(tile.rank, block(rank)),
        ROTATED=rotated,
        BLOCK_ROTATED=block(rotated),
        KEY_DIM=key_dim,
        BLOCK_KEY=block(key_dim),
        VALUE_DIM=value_dim,
        BLOCK_VALUE=block(value_dim),
        TILE=TILE_TOKENS,
        BLOCK_M=tile.tokens,
        SEARCH_BLOCK=SEARCH_BLOCK,
        UPCAST=device.INTERPRETED,
        num_warps=8,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


class _ExpansionTile(NamedTuple):
    """The tokens that one program expands. Registers and shared memory limit the sizes."""

    tokens: int  # divides TILE_TOKENS
    rank: int  # numbers of a latent per step
    stages: int


def _tile(columns: int, element_size: int) -> _ExpansionTile:
    """Return the tile for `columns` numbers of a key and a value together, with padding."""
    if element_size > 2:
        return _ExpansionTile(32, 16, 2)
    operands_in_shared_memory = device.architecture() // 10 in (9, 10)
    tokens = (32768 if operands_in_shared_memory else 16384) // columns
    rank = 64 if device.shared_bytes() >= MUCH_SHARED_BYTES else 32
    return _ExpansionTile(max(16, min(TILE_TOKENS, tokens)), rank, 3)


def _as_pool(made: Tensor, key_dim: int) -> Tensor:
    """View keys and values [tiles, heads, tokens, key_dim + value_dim] as pages [tiles, heads, 2,
    tokens, value_dim], without a copy. A key is longer than value_dim: attention reads its other
    numbers after the first ones."""
    tiles, heads, tokens, width = made.shape
    strides = made.stride()
    return made.as_strided(
        (tiles, heads, 2, tokens, width - key_dim), (*strides[:2], key_dim, *strides[2:])
    )


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    latents_ptr,
    page_ids_ptr,
    page_starts_ptr,
    lengths_ptr,
    tile_starts_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    num_rows,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Expand BLOCK_M tokens for one head. Tiles beyond those of the rows are skipped."""
    PARTS: tl.constexpr = TILE // BLOCK_M
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head = tl.program_id(1)
    if tile >= tl.load(tile_starts_ptr + num_rows):
        return
    row = last_at_most(tile_starts_ptr, num_rows, tile, 1, 0, SEARCH_BLOCK)
    inner = part * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = (tile - tl.load(tile_starts_ptr + row)) * TILE + inner
    # Tokens after the end read page 0. Their keys and values are never read.
    pages_ptr = page_ids_ptr + tl.load(page_starts_ptr + row)
    live = tokens < tl.load(lengths_ptr + row)
    pages = tl.load(pages_ptr + tokens // PAGE_SIZE, mask=live, other=0)
    latents = latents_ptr + pages.to(tl.int64) * PAGE_STRIDE + tokens % PAGE_SIZE * TOKEN_STRIDE
    key_dims, value_dims = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    others = tl.arange(0, BLOCK_ROTATED)
    keys_ptr += head * KEY_DIM * RANK + key_dims[None, :] * RANK
    values_ptr += head * VALUE_DIM * RANK + value_dims[None, :]
    in_key, in_value = (key_dims < KEY_DIM)[None, :], (value_dims < VALUE_DIM)[None, :]
    keys = tl.zeros([BLOCK_M, BLOCK_KEY], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    for first in range(0, RANK, BLOCK_RANK):
        numbers = first + tl.arange(0, BLOCK_RANK)
        used = numbers < RANK
        x = tl.load(latents[:, None] + numbers[None, :], mask=used[None, :], other=0.0)
        to_keys = tl.load(keys_ptr + numbers[:, None], mask=used[:, None] & in_key, other=0.0)
        places = values_ptr + numbers[:, None] * VALUE_DIM
        to_values = tl.load(places, mask=used[:, None] & in_value, other=0.0)
        x = x.to(tl.float32 if UPCAST else to_keys.dtype)
        to_keys, to_values = to_keys.to(x.dtype), to_values.to(x.dtype)
        keys = tl.dot(x, to_keys, keys, input_precision="ieee")
        values = tl.dot(x, to_values, values, input_precision="ieee")
    WIDTH: tl.constexpr = KEY_DIM + ROTATED + VALUE_DIM
    tile_head = (tile * tl.num_programs(1) + head).to(tl.int64)
    out = out_ptr + (tile_head * TILE + inner)[:, None] * WIDTH
    tl.store(out + key_dims[None, :], keys, mask=in_key)
    rotated_ptr = latents[:, None] + RANK + others[None, :]
    in_rotated = (others < ROTATED)[None, :]
    rotated = tl.load(rotated_ptr, mask=in_rotated, other=0.0).to(tl.float32)
    tl.store(out + KEY_DIM + others[None, :], rotated, mask=in_rotated)
    tl.store(out + KEY_DIM + ROTATED + value_dims[None, :], values, mask=in_value)
