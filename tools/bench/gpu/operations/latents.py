"""Attention over latents (MLA), on the shapes of DeepSeek-V3 and V2-Lite.

A decode step streams each latent once for all its heads. A chunk multiplies latents, or the keys
and values that each head expands from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import LatentExpansion
from kernels.attention.paged import plan_attention
from kernels.backends.chosen import PlanAttention
from tools.bench.gpu.operation import Compared, Make, Op
from tools.bench.gpu.operations.paged import LAYERS, PAGE_SIZE, TOLERANCE, Paged, Rows, paged
from tools.bench.gpu.setting import Floor, Setting

SHAPES = {"v3": (128, 512, 64), "v2-lite": (16, 512, 64)}  # heads, value_dim, rotated size
DRY_SHAPES = {"tiny": (4, 32, 8)}
SCALE = 192**-0.5
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
    def floor(self) -> Floor:
        """Return the FLOPs of the expansion, and of two products with every key and value."""
        (heads, key_dim, rank), rows = self.expansion.keys.shape, self.latents.rows
        value_dim = self.expansion.values.shape[2]
        made = sum(rows.lengths) * rank * (key_dim + value_dim)
        widths = self.q.shape[2] + value_dim
        return Floor("matmul", 2.0 * heads * (made + rows.num_seen * widths))

    def op(self, shape: str) -> Op:
        rows, latents = self.latents.rows, self.latents
        chunks = tuple(zip(rows.queries, rows.lengths, strict=True))
        plan = plan_expanded(latents.step(), latents.kv, self.expansion, chunks)
        assert plan is not None, "attention over latents is assumed to be faster"
        out = self.q.new_empty(*self.q.shape[:2], self.expansion.values.shape[2])

        def call() -> Tensor:
            plan.attend(self.q, latents.kv, self.expansion, out, scale=SCALE)
            return out

        return Op("latents expanded", shape, call, self.floor, self.compare, TOLERANCE)

    def compare(self, found: Tensor) -> Compared:
        """Compare some queries with attention over the latents themselves."""
        keys, values = self.expansion.keys.double(), self.expansion.values.double()
        for place in self.latents.rows.sample():
            q, key_dim = self.q[place].double(), keys.shape[1]
            over_latents = torch.einsum("hk,hkr->hr", q[:, :key_dim], keys)
            seen = self.latents.exact(place, torch.cat((over_latents, q[:, key_dim:]), dim=1))
            yield found[place], torch.einsum("hr,hrv->hv", seen, values)


def ops(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    """Yield operations whose plans are made by `planner`."""
    for name, shape in setting.sized(SHAPES, DRY_SHAPES).items():
        for batch, context in setting.sized(DECODES, ((2, 40),)):
            case, rows = f"decode {batch} x {context}, {name}", Rows.batch(batch, context)
            yield partial(_op, setting, case, rows, shape, "read", planner)
        for prefix, new in setting.sized(EXTENDS, ((9, 5),)):
            case, rows = f"{new} after {prefix}, {name}", Rows.extend(prefix, new)
            yield partial(_op, setting, case, rows, shape, "matmul", planner)
        for prefix, new in setting.sized(EXPANDED, ((0, 128),)):
            case, rows = f"{new} after {prefix}, {name}", Rows.extend(prefix, new)
            yield partial(_expanded, setting, case, rows, *shape)


def _op(
    setting: Setting,
    name: str,
    rows: Rows,
    shape: tuple[int, int, int],
    ceiling: str,
    planner: PlanAttention,
) -> Op:
    return _latents(setting, rows, *shape).op("latents", name, ceiling, planner)


def _expanded(setting: Setting, name: str, rows: Rows, heads: int, rank: int, rotated: int) -> Op:
    of_head = rank // 4  # size of a key and of a value
    keys, values = setting.randn(heads, of_head, rank), setting.randn(heads, rank, of_head)
    q = setting.randn(rows.num_tokens, heads, of_head + rotated)
    latents = _latents(setting, rows, heads, rank, rotated)
    return Expanded(latents, LatentExpansion(keys / 8, values / 8), q).op(name)


def _latents(setting: Setting, rows: Rows, heads: int, value_dim: int, rotated: int) -> Paged:
    shape = (sum(rows.num_pages(PAGE_SIZE)), LAYERS, 1, 1, PAGE_SIZE, value_dim + rotated)
    return paged(setting, rows, heads, setting.randn(*shape)[:, LAYERS // 2], SCALE, value_dim)
