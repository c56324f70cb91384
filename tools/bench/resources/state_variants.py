"""Kernel launches of layers with recurrent states, on the shape of Qwen3-Next."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from engine.models.blocks.delta_net import ByKeyHead, DeltaNet
from engine.models.blocks.layer import Norm
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import paged_attention, plan_attention
from kernels.experts.shared_expert import add_gated
from kernels.linear_attention.causal_conv import causal_conv
from kernels.linear_attention.delta_rule import Gates, delta_rule
from kernels.linear_attention.gated_norm import gated_rms_norm
from kernels.linear_attention.state_cells import StateRows
from kernels.pages.rope_and_store import rope_and_store

NET = DeltaNet(
    heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    width=4,
    norm=Norm(1e-6),
    projection=ByKeyHead(),
)
ATTENTION = PagedKV(kv_heads=2, head_dim=256)
HEADS, HIDDEN = 16, 2048
ROTATED = 32  # rotated pairs of numbers in a head
LAYERS = (NET.keeps, NET.keeps, NET.keeps, ATTENTION) * 12
NUM_PAGES = 4
PROMPT_TOKENS = 300


@dataclass(frozen=True)
class HybridModel:
    """Tensors as in a forward pass of the model."""

    dtype: torch.dtype
    page_size: int = 16

    @cached_property
    def pool(self) -> KVPool:
        layout = KVLayout.of(LAYERS, self.page_size, self.dtype)
        return KVPool(layout, NUM_PAGES, torch.device("cpu"))

    def tensor(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype)

    def states(self, n: int) -> None:
        """Run a delta net between its products, and store partly rotated K."""
        x, z = self._delta_net(n, self._rows(n, n))
        gated_rms_norm(x, z, self.tensor(NET.value_dim), 1e-6)
        self._store(n)

    def gated(self, n: int) -> None:
        """Run attention with gated outputs for a mixed batch, and a shared expert."""
        kv = self.pool.layers[3]
        for prompt in (0, PROMPT_TOKENS, 4096):
            num_tokens, rows = n + prompt, n + (prompt > 0)
            starts, each = (torch.zeros(rows + more, dtype=torch.int32) for more in (1, 0))
            step = AttentionRows(each, each, starts, each, num_tokens, num_decodes=n)
            plan = plan_attention(step, kv, AttentionKind(HEADS))
            q, gate = self._store(num_tokens)
            paged_attention(q, kv, plan, Scoring(ATTENTION.head_dim**-0.5), gate)
        x, weight = self.tensor(n, HIDDEN), self.tensor(1, HIDDEN)
        add_gated(x, x, x, weight)

    def _store(self, n: int) -> tuple[Tensor, Tensor]:
        """Store K beside gated queries. Return the queries and the gates."""
        size, norm = ATTENTION.head_dim, torch.empty(ATTENTION.head_dim)
        qkv = self.tensor(n, (2 * HEADS + 2 * ATTENTION.kv_heads) * size)
        angles, locations = torch.empty(2, n, ROTATED), torch.empty(n, dtype=torch.int64)
        q = rope_and_store(
            qkv,
            angles,
            self.pool.layers[3],
            locations,
            q_norm=norm,
            k_norm=norm,
            eps=1e-6,
            gated=True,
        )
        return q, qkv.view(n, qkv.shape[1] // size, size)[:, 1 : 2 * HEADS : 2]

    def prompts(self, n: int) -> None:
        """Run the recurrence of a delta net over prompts, beside decode rows."""
        self._delta_net(PROMPT_TOKENS + n, self._rows(n + 1, n))

    def _delta_net(self, num_tokens: int, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the outputs of the delta rule, and their gates."""
        x = self.tensor(num_tokens, NET.heads * (NET.channels + NET.group * NET.value_dim) + 64)
        z, b, a = NET.projection.split(NET, x)
        weight = self.tensor(NET.heads, NET.channels, NET.width)
        cells = self.pool.cells[1]
        x = causal_conv(x, NET.projection.columns(NET), weight, cells["conv"], rows)
        each = torch.empty(NET.value_heads)
        return delta_rule(x, Gates(a, b, each, each), cells["delta"], rows), z

    def _rows(self, n: int, num_decodes: int) -> StateRows:
        pages = torch.empty(n, self.pool.layout.state_pages, dtype=torch.int32)
        numbers = torch.empty(n + 1, dtype=torch.int32)
        return StateRows(numbers, pages, pages, numbers[:-1], pages, num_decodes)
