"""Attention over latents (MLA), on the shapes of DeepSeek-V3 and V2-Lite.

A decode step streams each latent once for all its heads. A chunk multiplies latents, or the keys
and values that each head expands from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import LatentExpansion
from kernels.attention.paged import plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.operations.paged import (
    TOLERANCE,
    Paged,
    Rows,
    attention_op,
    num_pages_of,
    paged,
)
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

SHAPES = {"v3": (128, 512, 64), "v2-lite": (16, 512, 64)}  # heads, value_dim, rotated size
DRY_SHAPES = {"tiny": (4, 32, 8)}
SCALE = 192**-0.5
PAGE_SIZE, LAYERS = 16, 4
DECODES = ((64, 8192), (1, 8192), (64, 1024), (1, 1024))  # rows, tokens of each row
EXTENDS = ((0, 2048), (8192, 256))  # tokens in the cache, and new ones
EXPANDED = ((0, 2048), (8192, 2048))  # the same, with expanded keys and values


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """A chunk over latents, and the matrices that expand them to keys and values."""

    latents: Paged
    expansion: LatentExpansion
    q: Tensor  # [num_tokens, heads, key_dim + rotated]

    @property
    def flops(self) -> float:
        """Return the FLOPs of the expansion, and of two products with every key and value."""
        (heads, key_dim, rank), rows = self.expansion.keys.shape, self.latents.rows
        value_dim = self.expansion.values.shape[2]
        made = sum(rows.lengths) * rank * (key_dim + value_dim)
        return 2.0 * heads * (made + rows.num_seen * (self.q.shape[2] + value_dim))

    def attention(self) -> Callable[[], Tensor]:
        rows, latents = self.latents.rows, self.latents
        plan = plan_expanded(
            latents.step(),
            latents.kv,
            self.expansion,
            tuple(zip(rows.queries, rows.lengths, strict=True)),
        )
        assert plan is not None, "attention over latents is assumed to be faster"
        out = self.q.new_empty(*self.q.shape[:2], self.expansion.values.shape[2])

        def run() -> Tensor:
            plan.attend(self.q, latents.kv, self.expansion, out, scale=SCALE)
            return out

        return run

    def error(self) -> float:
        """Compare some queries with attention over the latents themselves."""
        found, keys = self.attention()(), self.expansion.keys.double()
        key_dim, places, expected = keys.shape[1], self.latents.rows.sample(), []
        for place in places:
            q = self.q[place].double()
            over_latents = torch.einsum("hk,hkr->hr", q[:, :key_dim], keys)
            seen = self.latents.exact(place, torch.cat((over_latents, q[:, key_dim:]), dim=1))
            expected.append(torch.einsum("hr,hrv->hv", seen, self.expansion.values.double()))
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
    return attention_op("latents", name, _latents(setting, rows, *shape), ceiling, planner)


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


def _latents(setting: Setting, rows: Rows, heads: int, value_dim: int, rotated: int) -> Paged:
    shape = (num_pages_of(rows, PAGE_SIZE), LAYERS, 1, 1, PAGE_SIZE, value_dim + rotated)
    return paged(setting, rows, heads, setting.randn(*shape)[:, LAYERS // 2], SCALE, value_dim)
