"""Paged attention on synthetic rows: data, exact output, minimum bytes and FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import AttentionPlan, paged_attention, plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.operation import Compared, Op
from tools.bench.gpu.setting import Floor, Setting, Work

CHECKED = 12  # queries whose output is computed in float64
TOLERANCE = 1e-2  # probabilities are rounded before they are multiplied with the values
PAGE_SIZE = 16
LAYERS = 4  # layers in a pool, so that one layer's blocks are not adjacent
NO_PEERS: Mapping[str, Work] = {}


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


LARGE, SMALL = Heads(32, 8, 128), Heads(16, 8, 128)  # of 8B models and of Qwen3-0.6B
GATED = Heads(16, 2, 256)  # of Qwen3-Next
DRY = Heads(4, 2, 32)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of attention. Row i has queries for the last queries[i] of lengths[i] tokens."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def batch(cls, count: int, context: int, queries: int = 1) -> "Rows":
        """Return rows of odd lengths, so that last pages are partly filled with other data."""
        return cls((queries,) * count, tuple(context - row % 7 for row in range(count)))

    @classmethod
    def extend(cls, prefix: int, new: int) -> "Rows":
        return cls((new,), (prefix + new,))

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)

    def num_pages(self, page_size: int) -> list[int]:
        return [-(-length // page_size) for length in self.lengths]

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

    def floor(self, ceiling: str) -> Floor:
        """Return the least FLOPs for "matmul", and otherwise the least bytes.

        FLOPs: two products with every key that a query attends to. Bytes: KV, queries, gates and
        outputs.
        """
        if ceiling == "matmul":
            widths = self.q.shape[2] + self._out_dim
            return Floor(ceiling, 2.0 * self.rows.num_seen * self.q.shape[1] * widths)
        kv = sum(self.rows.lengths) * self.kv[0, :, :, 0].nbytes
        gates = 0 if self.gate is None else self.q.nbytes
        outputs = self.q[..., : self._out_dim].nbytes
        return Floor(ceiling, kv + gates + self.q.nbytes + outputs)

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

    def attention(self, plan: AttentionPlan) -> Tensor:
        """Make the call of a layer."""
        return paged_attention(self.q, self.kv, plan, Scoring(self.scale), gate=self.gate)

    def compare(self, found: Tensor) -> Compared:
        """Compare a sample of queries with float64."""
        places = self.rows.sample()
        exact = torch.stack([self.exact(place, self.q[place]).flatten() for place in places])
        if self.gate is not None:
            exact *= self.gate[places].double().flatten(1).sigmoid()
        return [(found[places], exact)]

    def op(
        self,
        name: str,
        shape: str,
        ceiling: str,
        planner: PlanAttention = plan_attention,
        peers: Mapping[str, Work] = NO_PEERS,
    ) -> Op:
        """Return the attention of these rows, with a plan made now."""
        call = partial(self.attention, self.plan(planner))
        return Op(name, shape, call, self.floor(ceiling), self.compare, TOLERANCE, peers)

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


def pages_of(
    setting: Setting, rows: Rows, heads: Heads, page_size: int = PAGE_SIZE, layers: int = LAYERS
) -> Paged:
    """Return rows over one layer of a pool as in serving, where a page is one block of all layers.

    With one layer, the pool is that of a single layer.
    """
    count = sum(rows.num_pages(page_size))
    pool = setting.randn(count, heads.kv_heads, layers, 2, page_size, heads.head_dim)
    return paged(setting, rows, heads.heads, pool.unbind(2)[layers // 2])


def paged(
    setting: Setting,
    rows: Rows,
    heads: int,
    kv: Tensor,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Paged:
    """Give the rows pages of `kv`, which has enough of them, in random order."""
    page_size, head_dim = kv.shape[3:]
    counts = rows.num_pages(page_size)
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    order = torch.randperm(kv.shape[0], device=setting.device)
    return Paged(
        rows,
        setting.randn(rows.num_tokens, heads, head_dim),
        kv,
        page_ids=order[: sum(counts)].int(),
        page_starts=on_device(_starts(counts)[:-1]),
        query_starts=on_device(_starts(rows.queries)),
        lengths=on_device(rows.lengths),
        scale=head_dim**-0.5 if scale is None else scale,
        value_dim=value_dim,
    )


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]
