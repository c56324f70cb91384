"""Attention over latents (MLA) with expanded keys and values, for prompt chunks: compiled for this
CPU, or in torch. expand_latents.py does the same on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import device
from kernels.attention.arguments import AttentionRows, Scoring
from kernels.attention.expand_latents import plan_triton
from kernels.attention.expansion import ExpandedPlan, LatentExpansion
from kernels.attention.reference import Chunk, attend_chunk, chunks_of, gathered_tokens
from kernels.attention.split_plan import LONGEST_HEAD
from kernels.cpu.operators import DTYPES, Operators

MOST_BYTES = 32 << 20  # limit of expanded keys and values at a time, except for a single head


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """Queries [start, end) of a step, which see the tokens of `pages` up to `length`.

    Attributes:
        chunks: chunks of these queries, for torch.
        alone: the row as a batch with keys and values in one page: page ids, page starts, query
            starts and lengths.
    """

    start: int
    end: int
    length: int
    pages: Tensor
    chunks: tuple[Chunk, ...]
    alone: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _CpuPlan:
    """The keys that each query of the chunks sees. Shared by all layers of a forward."""

    rows: tuple[_Row, ...]
    num_tokens: int

    def attend(
        self, q: Tensor, latents: Tensor, expansion: LatentExpansion, out: Tensor, *, scale: float
    ) -> None:
        width = max(q.shape[2], out.shape[2])
        compiled = device.compiled(q) if width <= LONGEST_HEAD and q.dtype in DTYPES else None
        wide = F.pad(q, (0, width - q.shape[2]))
        by_head = latents.permute(1, 2, 0, 3, 4)
        for row in self.rows:
            kept = gathered_tokens(by_head, row.pages, latents.dtype, q.dtype)[0, 0]
            at_once = max(1, MOST_BYTES // (2 * len(kept) * width * q.element_size()))
            for first in range(0, q.shape[1], at_once):
                heads = slice(first, first + at_once)
                kv = _made(kept, expansion.keys[heads], expansion.values[heads], width)
                queries, found = wide[row.start : row.end, heads], out[row.start : row.end, heads]
                if compiled is None:
                    _attend(queries, kv, row, scale, found)
                else:
                    _attend_compiled(compiled, queries, kv, row, scale, found)


def plan_expanded(
    rows: AttentionRows,
    latents: Tensor,
    expansion: LatentExpansion,
    chunks: Sequence[tuple[int, int]],
) -> ExpandedPlan | None:
    """Plan rows without padding, see `plan_attention`. Returns None if attention over latents is
    faster.

    Args:
        chunks: (queries, tokens) of each row, as known to the host.
    """
    if not chunks:
        return None
    if device.uses_triton(latents):
        return plan_triton(rows, latents, expansion, chunks)
    if not expansion.pays(chunks):
        return None
    page_size, start, planned = latents.shape[3], 0, []
    for place, (count, end) in zip(rows.page_starts.tolist(), chunks, strict=True):
        pages = rows.page_ids[place : place + -(-end // page_size)]
        parts = chunks_of(0, count, end - count, 0, None, latents.device)
        alone = tuple(
            torch.tensor(numbers, dtype=torch.int32) for numbers in ([0], [0], [0, count], [end])
        )
        planned.append(_Row(start, start + count, end, pages, parts, alone))
        start += count
    return _CpuPlan(tuple(planned), start)


def _attend(queries: Tensor, kv: Tensor, row: _Row, scale: float, out: Tensor) -> None:
    for chunk in row.chunks:
        k, v = kv[0, :, :, chunk.first : chunk.last].unbind(1)
        asking = queries[chunk.start : chunk.end].unsqueeze(2)
        found = attend_chunk(asking, k, v, chunk, Scoring(scale))
        out[chunk.start : chunk.end] = found[:, :, 0, : out.shape[2]]


def _attend_compiled(
    operators: Operators, queries: Tensor, kv: Tensor, row: _Row, scale: float, out: Tensor
) -> None:
    page_ids, page_starts, query_starts, lengths = row.alone
    found = out.new_empty(len(out), out.shape[1] * out.shape[2])
    operators.extend_attention(
        queries,
        kv,
        page_ids,
        page_starts,
        query_starts,
        lengths,
        found,
        window=None,
        scale=scale,
        soft_cap=None,
        sinks=None,
    )
    out.copy_(found.view(out.shape))


def _made(latents: Tensor, keys: Tensor, values: Tensor, width: int) -> Tensor:
    """Return each head's keys and values of latents [n, rank + rotated], as one page of a pool, [1,
    heads, 2, n, width].

    Shorter vectors are padded with zeros, because torch is fast if values are as long as keys.
    """
    heads, key_dim, rank = keys.shape
    alike, rotated = latents[:, :rank].expand(heads, -1, -1), latents[:, rank:]
    kv = latents.new_empty(2, heads, len(latents), width)
    for vectors, weights in ((kv[0], keys.mT), (kv[1], values)):
        torch.bmm(alike, weights, out=vectors[..., : weights.shape[2]])
        vectors[..., weights.shape[2] :] = 0
    kv[0, ..., key_dim : key_dim + rotated.shape[1]] = rotated
    return kv.transpose(0, 1).unsqueeze(0)
