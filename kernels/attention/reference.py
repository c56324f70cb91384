"""Paged attention in torch: the reference for the kernels, and the implementation for CPUs without
compiled operations.

Decode rows share padded gathers of their pages, and each other row has its own. The plan is made on
the host, which may wait for the device of its arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.layers.output_gate import gate_heads
from kernels.narrow import as_stored, widened

GROUP_BYTES = 2 << 20  # limit of a gather that rows share, so that it stays in cache
QUERY_BLOCK = 256  # queries of a chunk that share one mask


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Queries [start, end) of a row, and the visible keys [first, last) of its gathered pages.

    Attributes:
        mask: bool [queries, keys]. None if all queries see all keys, or if `causal`.
        causal: the mask is square and causal.
    """

    start: int
    end: int
    first: int
    last: int
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceRow:
    pages: Tensor  # int32 [live pages]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Decode rows whose pages are gathered together, padded to the longest row."""

    pages: Tensor  # int32 [rows * pages]
    queries: Tensor  # int64 [rows], indices in q
    visible: Tensor  # bool [rows, pages * page_size]
    stale: Tensor  # int64: gathered keys of live pages that the row has not written


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """The keys that each query sees, made by `plan_reference`."""

    rows: tuple[ReferenceRow, ...]
    groups: tuple[_Group, ...]
    blind: Tensor | None  # int64: indices in q of queries that see no key
    num_tokens: int
    value_dim: int | None  # of latents

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        num_tokens, heads, head_dim = q.shape
        out = q.new_empty(num_tokens, heads * (self.value_dim or head_dim))
        self.attend_into(out, q, kv, scoring)
        return gated(out, gate)

    def attend_into(self, result: Tensor, q: Tensor, kv: Tensor, scoring: Scoring) -> None:
        """Write the result of `attend` into a contiguous [num_tokens, heads * value_dim]."""
        num_tokens, heads, head_dim = q.shape
        kv_heads = kv.shape[1]
        grouped = q.view(num_tokens, kv_heads, heads // kv_heads, head_dim)
        by_head = as_stored(kv).permute(
            1, 2, 0, 3, 4
        )  # so that K and V of gathered pages are contiguous by head
        # The whole latent serves as value, because torch is fast if values are as long as keys.
        value_dim = self.value_dim or head_dim
        out = result.view(*grouped.shape[:3], value_dim)
        if scoring.sinks is not None:
            by_group = scoring.sinks.float().view(kv_heads, heads // kv_heads)
            scoring = scoring._replace(sinks=by_group)
        if self.blind is not None:
            out[self.blind] = 0
        for row in self.rows:
            gathered = gathered_tokens(by_head, row.pages, kv.dtype, q.dtype)
            k, v = gathered[:, 0], gathered[:, -1]
            for chunk in row.chunks:
                attended = attend_chunk(
                    grouped[chunk.start : chunk.end],
                    k[:, chunk.first : chunk.last],
                    v[:, chunk.first : chunk.last],
                    chunk,
                    scoring,
                )
                out[chunk.start : chunk.end] = attended[..., :value_dim]
        for group in self.groups:
            gathered = gathered_tokens(by_head, group.pages, kv.dtype, q.dtype)
            # A stale key may be NaN from another request, and NaN times a weight of 0 is NaN.
            gathered.index_fill_(2, group.stale, 0)
            by_vector = (kv_heads, -1, *group.visible.shape, head_dim)
            by_row = gathered.view(by_vector).transpose(0, 2)
            attended = _softmax_attention(
                grouped[group.queries],
                by_row[:, 0],  # [rows, kv_heads, keys, head_dim]
                by_row[:, -1],
                group.visible[:, None, None],
                False,
                scoring,
            )
            out[group.queries] = attended[..., :value_dim]


def gated(x: Tensor, gate: Tensor | None) -> Tensor:
    """Return x [num_tokens, heads * head_dim] times the sigmoid of a gate [num_tokens, heads,
    head_dim]. None: x itself."""
    return x if gate is None else gate_heads(x, gate)


def gathered_tokens(
    by_head: Tensor, pages: Tensor, kept_in: torch.dtype, computed_in: torch.dtype
) -> Tensor:
    """Return the tokens of these pages, [kv_heads, vectors, pages * page_size, head_dim]."""
    return widened(by_head.index_select(2, pages).flatten(2, 3), kept_in, computed_in)


def plan_reference(step: AttentionRows, kv: Tensor, kind: AttentionKind) -> ReferencePlan:
    """Make a plan from the checked arguments of `plan_attention`."""
    page_size, window = kv.shape[3], kind.window
    page_bytes = kv.shape[1:].numel() * kv.element_size()
    starts = step.query_starts.tolist()
    places = step.page_starts.tolist()
    rows = []
    decode: list[tuple[int, int, int, int]] = []  # live pages, first page, its index, row
    blind: list[int] = []
    for row, length in enumerate(step.lengths.tolist()):
        num_queries = starts[row + 1] - starts[row]
        if length == 0:
            blind += range(starts[row], starts[row + 1])
            continue
        oldest = length - num_queries
        first_page = max(0, oldest - window + 1) // page_size if window else 0
        place = places[row] + first_page
        size = -(-length // page_size) - first_page
        if num_queries == 1 and 2 * size * page_bytes <= GROUP_BYTES:
            decode.append((size, first_page, place, row))
            continue
        chunks = chunks_of(
            starts[row], num_queries, oldest, first_page * page_size, window, kv.device
        )
        rows.append(ReferenceRow(step.page_ids[place : place + size], chunks))
    decode.sort()
    groups = []
    while decode:
        longest = decode[-1][0]
        num_rows = GROUP_BYTES // (longest * page_bytes)  # at least 2
        taken = torch.tensor(decode[-num_rows:], device=kv.device)
        groups.append(_group(taken, longest, step, page_size, window))
        del decode[-num_rows:]
    nowhere = torch.tensor(blind, device=kv.device) if blind else None
    return ReferencePlan(tuple(rows), tuple(groups), nowhere, step.num_tokens, kind.value_dim)


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Queries of the tokens [first, end) of a row, from index `place` in q. They see keys up to
    `end`."""

    row: int
    place: int
    first: int
    end: int


def plan_spans(
    spans: Sequence[KeySpan],
    page_ids: Tensor,
    page_starts: Tensor,
    kv: Tensor,
    window: int | None,
) -> ReferencePlan:
    """Plan the attention of queries that also see later keys of their span. For the arguments see
    plan_attention.

    A window limits only the earlier keys of each query.
    """
    page_size = kv.shape[3]
    places = page_starts.tolist()
    rows = []
    for span in spans:
        first = max(0, span.first - window + 1) if window else 0
        first_page = first // page_size
        place = places[span.row] + first_page
        pages = page_ids[place : place + -(-span.end // page_size) - first_page]
        tokens = torch.arange(span.first, span.end, device=kv.device).unsqueeze(1)
        keys = torch.arange(first, span.end, device=kv.device)
        mask = keys > tokens - window if window else None
        start, past = first_page * page_size, span.place + span.end - span.first
        chunk = Chunk(span.place, past, first - start, span.end - start, mask)
        rows.append(ReferenceRow(pages, (chunk,)))
    return ReferencePlan(tuple(rows), (), None, 0, None)


def chunks_of(
    query: int,
    num_queries: int,
    oldest: int,
    first_key: int,
    window: int | None,
    device: torch.device,
) -> tuple[Chunk, ...]:
    length = oldest + num_queries
    if oldest == 0 and (window is None or window >= length):
        return (Chunk(query, query + num_queries, 0, length, causal=True),)
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
        chunks.append(Chunk(place + start, place + end, first - first_key, end - first_key, mask))
    return tuple(chunks)


def _group(
    taken: Tensor,
    num_pages: int,
    step: AttentionRows,
    page_size: int,
    window: int | None,
) -> _Group:
    _, first_pages, places, rows = taken.unbind(1)
    ends = step.lengths[rows].unsqueeze(1)
    offsets = torch.arange(num_pages, device=taken.device)
    columns = first_pages.unsqueeze(1) + offsets
    pages = step.page_ids[(places.unsqueeze(1) + offsets).clamp(max=len(step.page_ids) - 1)]
    live = columns * page_size < ends
    pages = pages.where(live, pages[:, :1])  # entries past the end are undefined
    keys = columns.unsqueeze(2) * page_size + torch.arange(page_size, device=taken.device)
    visible = keys.flatten(1) < ends
    # Padding repeats the row's first page, whose tail is stale if it is also the row's last page.
    newest = (live.sum(1, keepdim=True) - 1).clamp(min=0)
    tailed = pages == pages.gather(1, newest)
    stale = (~visible & tailed.repeat_interleave(page_size, dim=1)).flatten().nonzero().flatten()
    if window:
        visible &= keys.flatten(1) >= ends - window
    return _Group(pages.flatten(), step.query_starts[rows].long(), visible, stale)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: Chunk,
    scoring: Scoring,
) -> Tensor:
    """Attend from a chunk's queries.

    Args:
        q: [queries, kv_heads, group, head_dim].
        k, v: [kv_heads, keys, head_dim].
        scoring: sinks are [kv_heads, group].
    """
    if len(q) == 1:  # the group's heads are queries: keys are read once, not once per head
        return _softmax_attention(q, k[None], v[None], None, False, scoring)
    group = q.shape[2]
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.unsqueeze(-1))
    attended = _softmax_attention(
        q.permute(1, 2, 0, 3),
        k.unsqueeze(1).expand(-1, group, -1, -1),
        v.unsqueeze(1).expand(-1, group, -1, -1),
        chunk.mask,
        chunk.causal,
        scoring,
    )
    return attended.permute(2, 0, 1, 3)


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
) -> Tensor:
    """Attend from queries [..., queries, head_dim] to keys and values [..., keys, head_dim].

    Args:
        causal: there are as many queries as keys.
        scoring: sinks are float32 that broadcast to [..., queries].
    """
    scale, soft_cap, sinks = scoring.scale, scoring.soft_cap, scoring.sinks
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale
        )
    scores = scale * (q.float() @ k.float().transpose(-1, -2))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if causal:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    if sinks is not None:  # all weights shrink by the sink's share
        weights = weights * torch.sigmoid(scores.logsumexp(-1) - sinks).unsqueeze(-1)
    return (weights @ v.float()).to(q.dtype)
