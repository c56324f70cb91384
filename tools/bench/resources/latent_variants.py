"""Kernel launches of layers with latents (MLA), on the shape of DeepSeek-V3. See `variants.py`."""

from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch
from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedLatent
from kernels import device
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import LatentExpansion
from kernels.attention.paged import paged_attention, plan_attention
from kernels.layers.by_head import HeadMatrices
from kernels.pages.store_latents import rope_and_store_latents

RANK, ROTATED, KEY_DIM, LAYERS = 512, 64, 128, 61
PROMPTS = (2, 4096)  # lengths: one whose keys are split, and one that occupies the device
NUM_PAGES = 4


@dataclass(frozen=True)
class LatentModel:
    """Tensors as in a forward pass of the model. heads: 128 in DeepSeek-V3, 16 in V2-Lite."""

    dtype: torch.dtype
    heads: int = 128
    page_size: int = 16
    kept_in: torch.dtype | None = None  # dtype of latents, if different

    @cached_property
    def pool(self) -> KVPool:
        states = (PagedLatent(RANK + ROTATED),) * LAYERS
        layout = KVLayout.of(states, self.page_size, self.dtype, self.kept_in)
        return KVPool(layout, NUM_PAGES, torch.device("cpu"))

    def tensor(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype)

    def store(self, n: int) -> None:
        """Store latents: the last columns of a product that also contains the queries' input."""
        queries = self.tensor(n, self.heads, KEY_DIM + ROTATED)
        rope_and_store_latents(
            self.tensor(n, 1536 + RANK + ROTATED)[:, 1536:],
            self.tensor(RANK),
            1e-6,
            queries[..., KEY_DIM:],
            torch.empty(2, n, ROTATED // 2),
            self.pool.layers[1],
            torch.zeros(n, dtype=torch.int64),
            self.tensor(n, self.heads, RANK + ROTATED)[..., RANK:],
            interleaved=True,
        )

    def mixed(self, n: int) -> None:
        """Run a chunk of a prompt beside decode rows."""
        for prompt in PROMPTS:
            self._attend(n, n + prompt)

    def expanded(self, n: int) -> None:
        """Run a chunk of a prompt with expanded keys and values."""
        queries = 2048 + n
        expansion = LatentExpansion(
            self.tensor(self.heads, KEY_DIM, RANK), self.tensor(self.heads, RANK, KEY_DIM)
        )
        each, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        chunks = ((queries, queries),)
        plan = plan_expanded(
            AttentionRows(each, each, starts, each, queries, num_decodes=0),
            self.pool.layers[1],
            expansion,
            chunks,
        )
        assert plan is not None
        q = self.tensor(queries, self.heads, KEY_DIM + ROTATED)
        out = self.tensor(queries, self.heads, KEY_DIM)
        plan.attend(q, self.pool.layers[1], expansion, out, scale=192**-0.5)

    def invariant(self, n: int) -> None:
        """Run the operations that `engine.batch_invariant` changes."""
        with mock.patch.object(device, "batch_invariant", return_value=True):
            self.mixed(n)
            keys = HeadMatrices.of(self.tensor(self.heads, KEY_DIM, RANK))
            x, out = (self.tensor(n, self.heads, size + ROTATED) for size in (KEY_DIM, RANK))
            keys.multiply(x[..., :KEY_DIM], out[..., :RANK])

    def _attend(self, num_decodes: int, num_tokens: int) -> None:
        latents = self.pool.layers[1]
        starts, each = (torch.zeros(num_decodes + rows, dtype=torch.int32) for rows in (2, 1))
        step = AttentionRows(each, each, starts, each, num_tokens, num_decodes)
        plan = plan_attention(step, latents, AttentionKind(self.heads, value_dim=RANK))
        q = self.tensor(num_tokens, self.heads, RANK + ROTATED)
        paged_attention(q, latents, plan, Scoring(192**-0.5))
