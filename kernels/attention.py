"""Paged attention: extend, decode and mixed batches in one call.

A plan is made once per forward (and per sliding window) and used by every layer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_BYTES = 2 << 20  # rows share a padded gather up to this size: it then stays in cache
QUERY_BLOCK = 256  # queries of a chunk that share one mask


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Queries [start, end) of a row, and the keys [first, last) of its gathered pages they see.

    mask: bool [queries, keys]; None where all see all, or square and causal where `causal`.
    """

    start: int
    end: int
    first: int
    last: int
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    pages: Tensor  # int32 [live pages]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Decode rows whose pages are gathered together, padded to the longest."""

    pages: Tensor  # int32 [rows * pages]
    queries: Tensor  # int64 [rows], their places in q
    visible: Tensor  # bool [rows, pages * page_size]
    stale: Tensor  # int64: gathered keys that no token of the row has written


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Which keys each query sees: what the layers of one forward share. Opaque to callers."""

    rows: tuple[_Row, ...]
    groups: tuple[_Group, ...]
    num_tokens: int


def plan_attention(
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    page_bytes: int,
    window: int | None = None,
) -> AttentionPlan:
    """Plans the attention of a batch whose rows are consecutive ranges of queries.

    Row i's queries are the last `query_starts[i + 1] - query_starts[i]` of its lengths[i] tokens;
    each sees the keys up to its own token, the last `window` of them if there is a window.

    Args:
        page_table: int32 [num_rows, max_pages]; entry j of a row holds its tokens from
            j * page_size on. Entries past a row's length are never used.
        query_starts: int32 [num_rows + 1], ascending from 0.
        lengths: int32 [num_rows], each at least the row's number of queries.
        page_bytes: of one page of one layer.
    Raises:
        ValueError: wrong shapes, or a window below 1.
    """
    num_rows = lengths.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != num_rows:
        raise ValueError(f"page_table: [{num_rows}, pages], got {tuple(page_table.shape)}")
    if query_starts.shape != (num_rows + 1,):
        raise ValueError(f"query_starts: [{num_rows + 1}], got {tuple(query_starts.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window: at least 1, got {window}")
    return _plan_reference(page_table, query_starts, lengths, page_size, page_bytes, window)


def paged_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, *, scale: float) -> Tensor:
    """softmax(scale * q k) v for every query of a plan, reading live pages only.

    Args:
        q: [num_tokens, heads, head_dim], rows may be strided; heads a multiple of kv_heads, query
            head h reads KV head h // (heads / kv_heads).
        kv: one layer of the pool, [num_pages, kv_heads, 2, page_size, head_dim], any strides
            (pages are addressed in int64). What stale pages or tails hold, even NaN, has no effect.
    Returns:
        [num_tokens, heads * head_dim] of q's dtype.
    Raises:
        ValueError: wrong shapes.
    """
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: [pages, kv_heads, 2, page_size, head_dim], got {tuple(kv.shape)}")
    if q.ndim != 3 or q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
    if q.shape[0] != plan.num_tokens:
        raise ValueError(f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}")
    return _attend_reference(q, kv, plan, scale)


def _plan_reference(
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    page_size: int,
    page_bytes: int,
    window: int | None,
) -> AttentionPlan:
    starts = query_starts.tolist()
    rows = []
    decode: list[tuple[int, int, int]] = []  # live pages, first live page, row
    for row, length in enumerate(lengths.tolist()):
        num_queries = starts[row + 1] - starts[row]
        oldest = length - num_queries
        first_page = max(0, oldest - window + 1) // page_size if window else 0
        last_page = -(-length // page_size)
        size = last_page - first_page
        if num_queries == 1 and 2 * size * page_bytes <= GROUP_BYTES:
            decode.append((size, first_page, row))
            continue
        chunks = _chunks(
            starts[row], num_queries, oldest, first_page * page_size, window, page_table.device
        )
        rows.append(_Row(page_table[row, first_page:last_page], chunks))
    decode.sort()
    groups = []
    while decode:
        longest = decode[-1][0]
        num_rows = GROUP_BYTES // (longest * page_bytes)  # at least 2
        taken = torch.tensor(decode[-num_rows:], device=page_table.device)
        groups.append(_group(taken, longest, page_table, query_starts, lengths, page_size, window))
        del decode[-num_rows:]
    return AttentionPlan(tuple(rows), tuple(groups), starts[-1])


def _chunks(
    query: int,
    num_queries: int,
    oldest: int,
    first_key: int,
    window: int | None,
    device: torch.device,
) -> tuple[_Chunk, ...]:
    length = oldest + num_queries
    if oldest == 0 and (window is None or window >= length):
        return (_Chunk(query, query + num_queries, 0, length, causal=True),)
    chunks = []
    for start in range(oldest, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = max(0, start - window + 1) if window else 0
        tokens = torch.arange(start, end, device=device).unsqueeze(1)
        keys = torch.arange(first, end, device=device)
        visible = keys <= tokens
        if window:
            visible &= keys > tokens - window
        mask = visible if end - start > 1 else None
        place = query - oldest
        chunks.append(_Chunk(place + start, place + end, first - first_key, end - first_key, mask))
    return tuple(chunks)


def _group(
    taken: Tensor,
    num_pages: int,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    page_size: int,
    window: int | None,
) -> _Group:
    _, first_pages, rows = taken.unbind(1)
    ends = lengths[rows].unsqueeze(1)
    columns = first_pages.unsqueeze(1) + torch.arange(num_pages, device=taken.device)
    pages = page_table[rows.unsqueeze(1), columns.clamp(max=page_table.shape[1] - 1)]
    live = columns * page_size < ends
    pages = pages.where(live, pages[:, :1])  # entries past the end are noise
    keys = columns.unsqueeze(2) * page_size + torch.arange(page_size, device=taken.device)
    visible = keys.flatten(1) < ends
    # A padding page is the row's first: it has a tail of its own where that is the last one too.
    newest = (live.sum(1, keepdim=True) - 1).clamp(min=0)
    tailed = pages == pages.gather(1, newest)
    stale = (~visible & tailed.repeat_interleave(page_size, dim=1)).flatten().nonzero().flatten()
    if window:
        visible &= keys.flatten(1) >= ends - window
    return _Group(pages.flatten(), query_starts[rows].long(), visible, stale)


def _attend_reference(q: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    num_tokens, heads, head_dim = q.shape
    kv_heads = kv.shape[1]
    grouped = q.view(num_tokens, kv_heads, heads // kv_heads, head_dim)
    by_head = kv.permute(1, 2, 0, 3, 4)  # a gather of pages then has K and V contiguous by head
    out = q.new_empty(grouped.shape)
    for row in plan.rows:
        k, v = by_head.index_select(2, row.pages).flatten(2, 3).unbind(1)
        for chunk in row.chunks:
            out[chunk.start : chunk.end] = _attend_chunk(
                grouped[chunk.start : chunk.end],
                k[:, chunk.first : chunk.last],
                v[:, chunk.first : chunk.last],
                chunk,
                scale,
            )
    for group in plan.groups:
        gathered = by_head.index_select(2, group.pages).flatten(2, 3)
        # A stale key may be NaN, left by another request, and NaN times a weight of 0 is NaN.
        gathered.index_fill_(2, group.stale, 0)
        by_row = gathered.view(kv_heads, 2, *group.visible.shape, head_dim).transpose(0, 2)
        k, v = by_row.unbind(1)  # [rows, kv_heads, keys, head_dim]
        mask = group.visible[:, None, None]
        out[group.queries] = F.scaled_dot_product_attention(
            grouped[group.queries], k, v, attn_mask=mask, scale=scale
        )
    return out.flatten(1)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    """q: [queries, kv_heads, group, head_dim]; k, v: [kv_heads, keys, head_dim]."""
    if len(q) == 1:  # the group's heads as queries: keys are read once, not once per head
        return F.scaled_dot_product_attention(q, k[None], v[None], scale=scale)
    group = q.shape[2]
    attended = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.unsqueeze(1).expand(-1, group, -1, -1),
        v.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.causal,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3)
