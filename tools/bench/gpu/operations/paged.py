"""Paged attention on synthetic rows: data, exact output, minimum bytes and FLOPs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import AttentionPlan, paged_attention, plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.ops import relative_error
from tools.bench.gpu.setting import Setting

CHECKED = 12  # queries whose output is computed in float64


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

    @property
    def num_seen(self) -> int:
        """Return the total number of keys that queries attend to."""
        return sum(
            asked * length - asked * (asked - 1) // 2
            for asked, length in zip(self.queries, self.lengths, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """One layer's pages and the queries of some rows. Pages are scattered over the pool."""

    rows: Rows
    heads: Heads
    q: Tensor  # [num_tokens, heads, head_dim]
    kv: Tensor  # [num_pages, kv_heads, 2, page_size, head_dim]
    page_ids: Tensor
    page_starts: Tensor
    query_starts: Tensor
    lengths: Tensor
    gate: Tensor | None = None  # shape of q

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the rows' keys and values."""
        token_bytes = 2 * self.heads.kv_heads * self.heads.head_dim * self.kv.element_size()
        return sum(self.rows.lengths) * token_bytes

    @property
    def bytes(self) -> int:
        """Return the minimum bytes that attention must move: keys, values, queries, gates and
        outputs."""
        return self.kv_bytes + (2 if self.gate is None else 3) * self.q.nbytes

    @property
    def flops(self) -> float:
        """Return the minimum FLOPs: two products with every key that a query attends to."""
        return 4.0 * self.rows.num_seen * self.heads.heads * self.heads.head_dim

    def plan(self, planner: PlanAttention = plan_attention) -> AttentionPlan:
        decodes = self.rows.queries == (1,) * len(self.rows.queries)
        step = AttentionRows(
            self.page_ids,
            self.page_starts,
            self.query_starts,
            self.lengths,
            num_tokens=self.rows.num_tokens,
            num_decodes=len(self.rows.queries) if decodes else 0,
        )
        return planner(step, self.kv, AttentionKind(self.heads.heads))

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
        found = self.attention(planner)()
        last = self.rows.num_tokens - 1
        places = sorted({last * part // (CHECKED - 1) for part in range(CHECKED)})
        exact = torch.stack([self._exact(place) for place in places])
        return relative_error(found[places], exact)

    def contiguous(self, row: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a row, [kv_heads, length, head_dim] each."""
        length, first = self.rows.lengths[row], int(self.page_starts[row])
        count = -(-length // self.kv.shape[3])
        gathered = self.kv[self.page_ids[first : first + count].long()]
        k, v = gathered.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length].unbind(0)
        return k, v

    def _exact(self, place: int) -> Tensor:
        starts = self.query_starts.tolist()
        row = next(i for i in range(len(starts) - 1) if place < starts[i + 1])
        seen = self.rows.lengths[row] - (starts[row + 1] - 1 - place)
        k, v = (x[:, :seen].double() for x in self.contiguous(row))
        q = self.q[place].double().view(self.heads.kv_heads, -1, self.heads.head_dim)
        weights = (q @ k.transpose(1, 2) * self.scale).softmax(dim=-1)
        out = (weights @ v).flatten()
        return out if self.gate is None else out * self.gate[place].double().flatten().sigmoid()


def envelope(setting: Setting, heads: Heads, num_pages: int, page_size: int, layers: int) -> Tensor:
    """Return one layer of a pool as in serving, where a page is one block of all layers."""
    shape = (num_pages, heads.kv_heads, layers, 2, page_size, heads.head_dim)
    return setting.randn(*shape).unbind(2)[layers // 2]


def per_layer(setting: Setting, heads: Heads, num_pages: int, page_size: int) -> Tensor:
    """Return a pool of one layer only."""
    return setting.randn(num_pages, heads.kv_heads, 2, page_size, heads.head_dim)


def num_pages_of(rows: Rows, page_size: int) -> int:
    return sum(-(-length // page_size) for length in rows.lengths)


def paged(setting: Setting, rows: Rows, heads: Heads, kv: Tensor) -> Paged:
    """Give the rows pages of `kv` in random order. `kv` must have at least `num_pages_of` pages."""
    page_size = kv.shape[3]
    counts = [-(-length // page_size) for length in rows.lengths]
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    order = torch.randperm(kv.shape[0], device=setting.device)
    return Paged(
        rows,
        heads,
        setting.randn(rows.num_tokens, heads.heads, heads.head_dim),
        kv,
        page_ids=order[: sum(counts)].int(),
        page_starts=on_device([sum(counts[:i]) for i in range(len(counts))]),
        query_starts=on_device([sum(rows.queries[:i]) for i in range(len(counts) + 1)]),
        lengths=on_device(rows.lengths),
    )
