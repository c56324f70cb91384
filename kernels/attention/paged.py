"""Paged attention for extend, decode and mixed batches in one call.

A plan is made once per forward (and per sliding window), and used by every layer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels import device
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.extend import extend_attention
from kernels.attention.reference import gated, plan_reference
from kernels.attention.split_kv import split_attention
from kernels.attention.split_plan import (
    LONGEST_HEAD,
    MOST_LANES,
    SEGMENT,
    SplitPlan,
    lanes_of_items,
    plan_split,
)
from kernels.cpu.operators import DTYPES, Operators
from kernels.narrow import NARROW, as_stored, may_keep, widened

MAX_VALUE_DIM = 512  # of latents
# Maximum per program. Half as many if numbers have 32 bits or are widened, or if sums of earlier
# segments are in registers.
LATENT_HEADS = 32
# For 16-bit numbers, on GPUs that multiply operands of 64 rows in shared memory.
WIDE_LATENT_HEADS = 64

WIDENED_BYTES = 32 << 20  # 8-bit pages that are widened at a time, except for a single row


class AttentionPlan(Protocol):
    """The keys that each query sees. Shared by the layers of a forward. Opaque to callers."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def value_dim(self) -> int | None:
        """The planned value_dim of latents. None: no latents."""
        ...

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        """Compute `paged_attention` with checked arguments."""


def plan_attention(rows: AttentionRows, kv: Tensor, kind: AttentionKind) -> AttentionPlan:
    """Plan the attention of layers of one kind. Each query sees the keys up to its own token.

    Args:
        kv: any layer of the pool, see `paged_attention`. The plan is valid for every layer of this
            shape.
    Raises:
        ValueError: wrong shapes, or a window below 1.
    """
    rows.check()
    if kind.window is not None and kind.window < 1:
        raise ValueError(f"window: at least 1, got {kind.window}")
    check_kv(kv, kind.value_dim)
    if kind.heads % kv.shape[1]:
        raise ValueError(f"{kind.heads} heads do not fit kv {tuple(kv.shape)}")
    if device.uses_triton(kv):
        pool = kv if kind.value_dim is None else latents_as_heads(kv, kind.heads)
        return _TritonPlan(rows, kind, *_divided(rows, pool, kind))
    compiled = device.compiled(kv)
    if compiled is None or kv.dtype not in DTYPES.keys() | NARROW:
        return plan_reference(rows, kv, kind)
    plan = _CompiledPlan(rows, kind, compiled)
    return _WidenedPlan.of(plan, kv) if kv.dtype in NARROW else plan


def _divided(
    rows: AttentionRows, kv: Tensor, kind: AttentionKind
) -> tuple[bool, tuple[SplitPlan, ...]]:
    """Return whether the keys of the rows before the decode rows are not split, and the plans of
    the other rows.

    Rows that verify drafts share a plan with the decode rows. If no row may affect the bits of
    another, all rows have fixed segments.
    """
    num_extends, num_decodes, kv_heads = rows.num_extends, rows.num_decodes, kv.shape[1]
    plan = partial(plan_split, rows.lengths, kv, kind=kind)
    if device.batch_invariant():
        plan = partial(plan, segment=SEGMENT)
        splits = [plan(num_decodes, num_decodes)] if num_decodes else []
        if num_extends:
            splits.append(plan(num_extends, rows.num_queries, query_starts=rows.query_starts))
        return False, tuple(splits)
    lanes = None
    if num_extends:
        lanes = lanes_of_items(
            num_extends,
            rows.num_queries,
            group=kind.heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=kv.shape[4],
            element_size=kv.element_size(),
            multiprocessors=device.num_multiprocessors(kv.device),
        )
    if lanes is not None and lanes < MOST_LANES:
        together = plan(rows.num_rows, rows.num_tokens, lanes=lanes, query_starts=rows.query_starts)
        return False, (together,)
    splits = []
    if lanes is not None:
        splits.append(
            plan(num_extends, rows.num_queries, lanes=lanes, query_starts=rows.query_starts)
        )
    if num_decodes:
        splits.append(plan(num_decodes, num_decodes))
    return num_extends > 0 and lanes is None, tuple(splits)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    gate: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * q k) v for every query of a plan. Reads only live pages.

    Args:
        q: [num_tokens, heads, head_dim], rows may be strided. heads is a multiple of kv_heads, and
            query head h reads KV head h // (heads / kv_heads).
        kv: one layer of the pool, [num_pages, kv_heads, 2, page_size, head_dim], or of latents
            [num_pages, 1, 1, page_size, head_dim]. Of q's dtype, or of a narrow one whose scales
            the caller applies. Any strides but the last (pages are addressed in int64). page_size
            is a power of two, at least 16. The contents of stale pages or tails, even NaN, have no
            effect.
        gate: as q, not for latents: the rounded output is multiplied by its sigmoid.
    Returns:
        [num_tokens, heads * value_dim] of q's dtype.
    Raises:
        ValueError: wrong shapes or numbers.
    """
    check_kv(kv, plan.value_dim)
    if (
        q.ndim != 3
        or q.shape[2] != kv.shape[4]
        or q.shape[1] % kv.shape[1]
        or q.stride(2) != 1
        or not may_keep(kv.dtype, q.dtype)
    ):
        raise ValueError(f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
    if q.shape[0] != plan.num_tokens:
        raise ValueError(f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}")
    soft_cap, sinks = scoring.soft_cap, scoring.sinks
    if scoring.scale <= 0 or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(f"scale and soft_cap: above 0, got {scoring.scale} and {soft_cap}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.is_contiguous()):
        raise ValueError(f"sinks: contiguous [{q.shape[1]}], got {tuple(sinks.shape)}")
    if gate is not None and (
        plan.value_dim is not None
        or (gate.shape, gate.dtype) != (q.shape, q.dtype)
        or gate.stride(2) != 1
    ):
        raise ValueError(f"gate {gate.dtype} {tuple(gate.shape)} does not fit q {tuple(q.shape)}")
    return plan.attend(q, kv, scoring, gate)


@dataclass(frozen=True, slots=True, eq=False)
class _TritonPlan:
    """A plan for Triton: rows whose keys are not split come first. Both kinds of rows have their
    own kernel and write into one output.

    Attributes:
        whole: whether the keys of the rows before the decode rows are not split.
    """

    rows: AttentionRows
    kind: AttentionKind
    whole: bool
    splits: tuple[SplitPlan, ...]

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens

    @property
    def value_dim(self) -> int | None:
        return self.kind.value_dim

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        num_tokens, heads, head_dim = q.shape
        if self.kind.value_dim is not None:
            head_dim, kv = self.kind.value_dim, latents_as_heads(kv, heads)
        out = torch.empty(num_tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        if self.whole:
            extend_attention(q, kv, self.rows, out, self.kind.window, scoring, gate)
        for split in self.splits:
            split_attention(q, kv, self.rows, split, out, scoring, gate)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledPlan:
    """A plan for the compiled library: extend rows come first. Extend and decode rows have their
    own loop and write into one output. Over latents, the loop of extend rows computes all rows."""

    rows: AttentionRows
    kind: AttentionKind
    operators: Operators

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens

    @property
    def value_dim(self) -> int | None:
        return self.kind.value_dim

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        if q.stride(1) != q.shape[2]:  # the loops read a token's heads consecutively
            q = q.contiguous()
        rows, kind = self.rows, self.kind
        extends, queries, value_dim = rows.num_extends, rows.num_queries, q.shape[2]
        if kind.value_dim is not None:
            extends, queries, value_dim = rows.num_rows, rows.num_tokens, kind.value_dim
            kv = kv.expand(-1, _shares(q.shape[1], extends), 2, -1, -1)
        out = q.new_empty(rows.num_tokens, q.shape[1] * value_dim)
        if extends:
            self.operators.extend_attention(
                q[:queries],
                kv,
                rows.page_ids,
                rows.page_starts[:extends],
                rows.query_starts[: extends + 1],
                rows.lengths[:extends],
                out[:queries],
                kind.window,
                *scoring,
            )
        if extends < rows.num_rows:
            self.operators.decode_attention(
                q[queries:],
                kv,
                rows.page_ids,
                rows.page_starts[extends:],
                rows.lengths[extends:],
                out[queries:],
                kind.window,
                *scoring,
            )
        return gated(out, gate)


@dataclass(frozen=True, slots=True, eq=False)
class _WidenedPlan:
    """A plan over 8-bit pages, which are widened for some rows at a time.

    Attributes:
        parts: for each part: the pages of consecutive rows, int32, and a plan that numbers these
            pages from 0.
    """

    parts: tuple[tuple[Tensor, _CompiledPlan], ...]
    num_tokens: int
    value_dim: int | None

    @classmethod
    def of(cls, plan: _CompiledPlan, kv: Tensor) -> "_WidenedPlan":
        """Return a plan over pages like those of `kv` that computes the same as `plan`."""
        whole, window, page_size = plan.rows, plan.kind.window, kv.shape[3]
        lengths = whole.lengths
        first = torch.zeros_like(lengths)
        if window is not None:
            oldest = lengths - torch.diff(whole.query_starts)
            first = (oldest - window + 1).clamp(min=0) // page_size
        counts = (lengths + page_size - 1) // page_size - first
        before = counts.cumsum(0) - counts
        most = max(1, WIDENED_BYTES // (kv.shape[1:].numel() * torch.float32.itemsize))
        _, sizes = torch.unique_consecutive(before // most, return_counts=True)
        parts, begin = [], 0
        for size in sizes.tolist() or [0]:
            of_part, end = slice(begin, begin + size), begin + size
            starts = whole.query_starts[begin : end + 1] - whole.query_starts[begin]
            own = AttentionRows(
                torch.arange(int(counts[of_part].sum()), dtype=torch.int32),
                (before[of_part] - before[of_part][:1] - first[of_part]).int(),
                starts,
                lengths[of_part],
                int(starts[-1]),
                end - max(begin, min(end, whole.num_extends)),
            )
            offsets = whole.page_starts[of_part] - own.page_starts
            places = offsets.repeat_interleave(counts[of_part])
            pages = whole.page_ids[places + own.page_ids]
            parts.append((pages, _CompiledPlan(own, plan.kind, plan.operators)))
            begin = end
        return cls(tuple(parts), whole.num_tokens, plan.value_dim)

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        outputs, begin = [], 0
        for pages, plan in self.parts:
            wide = widened(as_stored(kv).index_select(0, pages), kv.dtype, q.dtype)
            outputs.append(plan.attend(q[begin : begin + plan.num_tokens], wide, scoring, None))
            begin += plan.num_tokens
        return gated(outputs[0] if len(outputs) == 1 else torch.cat(outputs), gate)


def _shares(heads: int, num_rows: int) -> int:
    """Return into how many parts a row's heads are divided, so that all threads have work. Has no
    effect on any bit."""
    threads = torch.get_num_threads()
    wanted = min(heads, -(-threads // max(1, num_rows)))
    return next(count for count in range(wanted, heads + 1) if heads % count == 0)


def check_kv(kv: Tensor, value_dim: int | None = None) -> None:
    """Raise ValueError unless kv is a layer of a pool as `paged_attention` requires it."""
    if kv.ndim != 5 or kv.stride(4) != 1:
        raise ValueError(f"kv: [pages, kv_heads, 2, page_size, head_dim], got {tuple(kv.shape)}")
    if kv.shape[3] < 16 or kv.shape[3] & (kv.shape[3] - 1):
        raise ValueError(f"page_size: a power of two from 16 on, got {kv.shape[3]}")
    if value_dim is None:
        if kv.shape[2] != 2 or kv.shape[4] > LONGEST_HEAD:
            raise ValueError(
                f"kv: [pages, kv_heads, 2, page_size, up to {LONGEST_HEAD}], got {tuple(kv.shape)}"
            )
    elif kv.shape[1:3] != (1, 1) or not 0 < value_dim < kv.shape[4]:
        raise ValueError(
            f"latents: [pages, 1, 1, page_size, more than {value_dim}], got {tuple(kv.shape)}"
        )
    elif value_dim > MAX_VALUE_DIM or kv.shape[4] - value_dim > LONGEST_HEAD:
        raise ValueError(
            f"latents: values of up to {MAX_VALUE_DIM} numbers and keys of {LONGEST_HEAD} more,"
            f" got {value_dim} of {kv.shape[4]}"
        )


def latents_as_heads(latents: Tensor, num_heads: int) -> Tensor:
    """View latents [pages, 1, 1, page_size, size] as [pages, groups, 2, page_size, size], without a
    copy.

    A latent is the key of all query heads, and its first numbers are the value. One program
    computes only as many heads as fit into its registers, so each such group acts as a KV head. All
    groups have the same address, and each value lies within its key.
    """
    if latents.element_size() != 2 or device.batch_invariant():
        most = LATENT_HEADS // 2
    else:
        wide = device.architecture() // 10 == 9
        most = WIDE_LATENT_HEADS if wide else LATENT_HEADS
    sharing = max(size for size in range(1, most + 1) if num_heads % size == 0)
    return latents.expand(-1, num_heads // sharing, 2, -1, -1)
