"""Paged attention on synthetic rows: data, exact output, minimum bytes and FLOPs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import AttentionPlan, paged_attention, plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

CHECKED = 12  # queries whose output is computed in float64
TOLERANCE = 1e-2  # probabilities are rounded before they are multiplied with the values


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of attention. Row i has queries for the last queries[i] of lengths[i] tokens."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def decode(cls, lengths: Sequence[int]) -> "Rows":
        return cls((1,) * len(lengths), tuple(lengths))

    @classmethod
    def extend(cls, prefix: int, new: int) -> "Rows":
        return cls((new,), (prefix + new,))

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)

    def sample(self) -> list[int]:
        """Return the queries whose output is computed in float64."""
        last = self.num_tokens - 1
        return sorted({last * part // (CHECKED - 1) for part in range(CHECKED)})

    @property
    def num_seen(self) -> int:
        """Return the total number of keys that queries attend to."""
        return sum(
            asked * length - asked * (asked - 1) // 2
            for asked, length in zip(self.queries, self.lengths, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Queries of some rows over one layer's pages, which are scattered over the pool.

    value_dim: the pages have latents, whose first `value_dim` numbers are the values. None: keys
    and values.
    """

    rows: Rows
    q: Tensor  # [num_tokens, heads, head_dim]
    kv: Tensor  # [num_pages, kv_heads, 2, page_size, head_dim], latents [num_pages, 1, 1, ...]
    page_ids: Tensor
    page_starts: Tensor
    query_starts: Tensor
    lengths: Tensor
    scale: float
    value_dim: int | None = None
    gate: Tensor | None = None  # shape of q

    @property
    def _out_dim(self) -> int:
        return self.value_dim or self.q.shape[2]

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the rows' keys and values."""
        return sum(self.rows.lengths) * self.kv[0, :, :, 0].nbytes

    @property
    def bytes(self) -> int:
        """Return the minimum bytes that attention moves: KV, queries, gates and outputs."""
        gate = 0 if self.gate is None else self.q.nbytes
        return self.kv_bytes + gate + self.q.nbytes + self.q[..., : self._out_dim].nbytes

    @property
    def flops(self) -> float:
        """Return the minimum FLOPs: two products with every key that a query attends to."""
        return 2.0 * self.rows.num_seen * self.q.shape[1] * (self.q.shape[2] + self._out_dim)

    def step(self) -> AttentionRows:
        decodes = max(self.rows.queries) == 1
        return AttentionRows(
            self.page_ids,
            self.page_starts,
            self.query_starts,
            self.lengths,
            num_tokens=self.rows.num_tokens,
            num_decodes=len(self.rows.queries) if decodes else 0,
        )

    def plan(self, planner: PlanAttention = plan_attention) -> AttentionPlan:
        kind = AttentionKind(self.q.shape[1], value_dim=self.value_dim)
        return planner(self.step(), self.kv, kind)

    def gated(self, setting: Setting) -> "Paged":
        """Return the same rows with gates, which alternate with the queries of a head in memory."""
        q, gate = setting.randn(*self.q.shape[:2], 2, self.q.shape[2]).unbind(2)
        return replace(self, q=q, gate=gate)

    def attention(self, planner: PlanAttention = plan_attention) -> Callable[[], Tensor]:
        """Return the call that a layer makes, with a plan made now."""
        plan = self.plan(planner)
        return partial(paged_attention, self.q, self.kv, plan, Scoring(self.scale), gate=self.gate)

    def error(self, planner: PlanAttention = plan_attention) -> float:
        """Return the error of a sample of queries against float64."""
        found, places = self.attention(planner)(), self.rows.sample()
        exact = torch.stack([self.exact(place, self.q[place]).flatten() for place in places])
        if self.gate is not None:
            exact *= self.gate[places].double().flatten(1).sigmoid()
        return relative_error(found[places], exact)

    def contiguous(self, row: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a row, [kv_heads, length, head_dim] each."""
        length, first = self.rows.lengths[row], int(self.page_starts[row])
        count = -(-length // self.kv.shape[3])
        gathered = self.kv[self.page_ids[first : first + count].long()]
        vectors = gathered.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return vectors[0], vectors[-1, ..., : self._out_dim]

    def exact(self, place: int, q: Tensor) -> Tensor:
        """Return the output [heads, value size] of one query [heads, head_dim] in float64."""
        starts = self.query_starts.tolist()
        row = next(i for i in range(len(starts) - 1) if place < starts[i + 1])
        seen = self.rows.lengths[row] - (starts[row + 1] - 1 - place)
        k, v = (x[:, :seen].double() for x in self.contiguous(row))
        q = q.double().view(k.shape[0], -1, k.shape[2])
        weights = (q @ k.transpose(1, 2) * self.scale).softmax(dim=-1)
        return (weights @ v).flatten(0, 1)


def attention_op(
    name: str,
    shape: str,
    data: Paged,
    ceiling: str,
    planner: PlanAttention = plan_attention,
    **more: Any,
) -> Op:
    """Return the operation whose lower bound is the bytes of `data`, or its FLOPs for matmul."""
    return Op(
        name=name,
        shape=shape,
        call=data.attention(planner),
        error=partial(data.error, planner),
        tolerance=TOLERANCE,
        ceiling=ceiling,
        amount=data.flops if ceiling == "matmul" else data.bytes,
        **more,
    )


def envelope(setting: Setting, heads: Heads, num_pages: int, page_size: int, layers: int) -> Tensor:
    """Return one layer of a pool as in serving, where a page is one block of all layers."""
    shape = (num_pages, heads.kv_heads, layers, 2, page_size, heads.head_dim)
    return setting.randn(*shape).unbind(2)[layers // 2]


def per_layer(setting: Setting, heads: Heads, num_pages: int, page_size: int) -> Tensor:
    """Return a pool of one layer only."""
    return setting.randn(num_pages, heads.kv_heads, 2, page_size, heads.head_dim)


def num_pages_of(rows: Rows, page_size: int) -> int:
    return sum(-(-length // page_size) for length in rows.lengths)


def paged(
    setting: Setting,
    rows: Rows,
    heads: int,
    kv: Tensor,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Paged:
    """Give the rows pages of `kv` in random order. `kv` must have at least `num_pages_of` pages."""
    page_size, head_dim = kv.shape[3:]
    counts = [-(-length // page_size) for length in rows.lengths]
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    order = torch.randperm(kv.shape[0], device=setting.device)
    return Paged(
        rows,
        setting.randn(rows.num_tokens, heads, head_dim),
        kv,
        page_ids=order[: sum(counts)].int(),
        page_starts=on_device([sum(counts[:i]) for i in range(len(counts))]),
        query_starts=on_device([sum(rows.queries[:i]) for i in range(len(counts) + 1)]),
        lengths=on_device(rows.lengths),
        scale=head_dim**-0.5 if scale is None else scale,
        value_dim=value_dim,
    )
