"""Attention over latents (MLA), on the shapes of DeepSeek-V3 and V2-Lite.

A decode step streams each latent once for all its heads. A chunk multiplies latents, or the keys
and values that each head expands from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import LatentExpansion
from kernels.attention.paged import paged_attention, plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.clock import Work
from tools.bench.gpu.operations.paged import Rows
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

SHAPES = {"v3": (128, 512, 64), "v2-lite": (16, 512, 64)}  # heads, value_dim, rotated size
DRY_SHAPES = {"tiny": (4, 32, 8)}
SCALE = 192**-0.5
PAGE_SIZE, LAYERS = 16, 4
DECODES = ((64, 8192), (1, 8192), (64, 1024), (1, 1024))  # rows, tokens of each row
EXTENDS = ((0, 2048), (8192, 256))  # tokens in the cache, and new ones
EXPANDED = ((0, 2048), (8192, 2048))  # the same, with expanded keys and values
TOLERANCE = 1e-2
CHECKED = 6  # queries whose output is computed in float64


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Rows over one layer of a pool, with their pages in random order."""

    rows: Rows
    value_dim: int
    q: Tensor  # [num_tokens, heads, size]
    pool: Tensor  # [num_pages, 1, 1, PAGE_SIZE, size]
    page_ids: Tensor
    page_starts: Tensor
    query_starts: Tensor
    lengths: Tensor

    @property
    def bytes(self) -> int:
        """Return the minimum bytes that attention must move: latents, queries and outputs."""
        size = self.q.shape[2]
        kept = sum(self.rows.lengths) * size * self.q.element_size()
        return kept + self.q.nbytes * (size + self.value_dim) // size

    @property
    def flops(self) -> float:
        """Return the minimum FLOPs without expansion: two products per visible latent."""
        size, heads = self.q.shape[2] + self.value_dim, self.q.shape[1]
        return 2.0 * self.rows.num_seen * heads * size

    def attention(self, planner: PlanAttention = plan_attention) -> Work:
        kind = AttentionKind(self.q.shape[1], value_dim=self.value_dim)
        plan = planner(self.step(), self.pool, kind)
        return partial(paged_attention, self.q, self.pool, plan, Scoring(SCALE))

    def step(self) -> AttentionRows:
        return AttentionRows(
            self.page_ids,
            self.page_starts,
            self.query_starts,
            self.lengths,
            num_tokens=self.rows.num_tokens,
            num_decodes=len(self.rows.queries) if max(self.rows.queries) == 1 else 0,
        )

    def error(self, planner: PlanAttention = plan_attention) -> float:
        found = self.attention(planner)()
        last = self.rows.num_tokens - 1
        places = sorted({last * part // (CHECKED - 1) for part in range(CHECKED)})
        assert isinstance(found, Tensor)
        return relative_error(
            found[places], torch.stack([self.exact(one, self.q[one]).flatten() for one in places])
        )

    def exact(self, place: int, q: Tensor) -> Tensor:
        """Return the output [heads, value_dim] of one query [heads, size] in float64."""
        starts = self.query_starts.tolist()
        row = next(i for i in range(len(starts) - 1) if place < starts[i + 1])
        seen = self.rows.lengths[row] - (starts[row + 1] - 1 - place)
        first = int(self.page_starts[row])
        pages = self.page_ids[first : first - (-seen // PAGE_SIZE)].long()
        keys = self.pool[pages, 0, 0].flatten(0, 1)[:seen].double()
        weights = (q.double() @ keys.t() * SCALE).softmax(dim=-1)
        return weights @ keys[:, : self.value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """A chunk over latents, and the matrices that expand them to keys and values."""

    latents: Latents
    expansion: LatentExpansion
    q: Tensor  # [num_tokens, heads, key_dim + rotated]

    @property
    def flops(self) -> float:
        """Return the FLOPs of the expansion, and of two products with every key and value."""
        (heads, key_dim, rank), rows = self.expansion.keys.shape, self.latents.rows
        value_dim = self.expansion.values.shape[2]
        made = sum(rows.lengths) * rank * (key_dim + value_dim)
        return 2.0 * heads * (made + rows.num_seen * (self.q.shape[2] + value_dim))

    def attention(self) -> Work:
        rows, latents = self.latents.rows, self.latents
        plan = plan_expanded(
            latents.step(),
            latents.pool,
            self.expansion,
            tuple(zip(rows.queries, rows.lengths, strict=True)),
        )
        assert plan is not None, "attention over latents is assumed to be faster"
        out = self.q.new_empty(*self.q.shape[:2], self.expansion.values.shape[2])

        def run() -> Tensor:
            plan.attend(self.q, latents.pool, self.expansion, out, scale=SCALE)
            return out

        return run

    def error(self) -> float:
        """Compare some queries with attention over the latents themselves."""
        found, keys = self.attention()(), self.expansion.keys.double()
        key_dim, last = keys.shape[1], self.latents.rows.num_tokens - 1
        places = sorted({last * part // (CHECKED - 1) for part in range(CHECKED)})
        expected = []
        for place in places:
            q = self.q[place].double()
            over_latents = torch.einsum("hk,hkr->hr", q[:, :key_dim], keys)
            seen = self.latents.exact(place, torch.cat((over_latents, q[:, key_dim:]), dim=1))
            expected.append(torch.einsum("hr,hrv->hv", seen, self.expansion.values.double()))
        assert isinstance(found, Tensor)
        return relative_error(found[places], torch.stack(expected))


def ops(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Callable[[], Op]]:
    """Yield operations whose plans are made by `planner`."""
    op = partial(_op, setting, planner)
    for name, shape in setting.sized(SHAPES, DRY_SHAPES).items():
        for batch, context in setting.sized(DECODES, ((2, 40),)):
            rows = Rows.decode([context - row % 7 for row in range(batch)])
            yield partial(op, f"decode {batch} x {context}, {name}", rows, shape, "read")
        for prefix, new in setting.sized(EXTENDS, ((9, 5),)):
            rows = Rows.extend(prefix, new)
            yield partial(op, f"{new} after {prefix}, {name}", rows, shape, "matmul")
        for prefix, new in setting.sized(EXPANDED, ((0, 128),)):
            rows = Rows.extend(prefix, new)
            yield partial(_expanded, setting, f"{new} after {prefix}, {name}", rows, shape)


def _op(
    setting: Setting,
    planner: PlanAttention,
    name: str,
    rows: Rows,
    shape: tuple[int, int, int],
    ceiling: str,
) -> Op:
    data = _latents(setting, rows, *shape)
    return Op(
        name="latents",
        shape=name,
        call=data.attention(planner),
        error=partial(data.error, planner),
        tolerance=TOLERANCE,
        ceiling=ceiling,
        amount=data.bytes if ceiling == "read" else data.flops,
    )


def _expanded(setting: Setting, name: str, rows: Rows, shape: tuple[int, int, int]) -> Op:
    (heads, rank, rotated), latents = shape, _latents(setting, rows, *shape)
    of_head = rank // 4  # size of a key and of a value
    expansion = LatentExpansion(
        setting.randn(heads, of_head, rank) / 8, setting.randn(heads, rank, of_head) / 8
    )
    data = Expanded(latents, expansion, setting.randn(rows.num_tokens, heads, of_head + rotated))
    return Op(
        name="latents expanded",
        shape=name,
        call=data.attention(),
        error=data.error,
        tolerance=TOLERANCE,
        ceiling="matmul",
        amount=data.flops,
    )


def _latents(setting: Setting, rows: Rows, heads: int, value_dim: int, rotated: int) -> Latents:
    size = value_dim + rotated
    counts = [-(-length // PAGE_SIZE) for length in rows.lengths]
    pool = setting.randn(sum(counts), LAYERS, PAGE_SIZE, size)[:, LAYERS // 2]
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    return Latents(
        rows,
        value_dim,
        setting.randn(rows.num_tokens, heads, size),
        pool[:, None, None],
        page_ids=torch.randperm(sum(counts), device=setting.device).int(),
        page_starts=on_device([sum(counts[:i]) for i in range(len(counts))]),
        query_starts=on_device([sum(rows.queries[:i]) for i in range(len(rows.queries) + 1)]),
        lengths=on_device(rows.lengths),
    )
