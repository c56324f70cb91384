"""Kernel launches of layers with a state, on the shape of Qwen3-Next. See `variants.py`."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from engine.models.blocks.delta_net import ByKeyHead, DeltaNet
from engine.models.blocks.norm import Norm
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
ROTATED = 32  # rotated pairs of a head's numbers
LAYERS = (NET.keeps, NET.keeps, NET.keeps, ATTENTION) * 12
NUM_PAGES = 4
PROMPT_TOKENS = 300


@dataclass(frozen=True)
class HybridModel:
    """Tensors as in a forward of the model."""

    dtype: torch.dtype
    page_size: int = 16

    @cached_property
    def pool(self) -> KVPool:
        layout = KVLayout.of(LAYERS, self.page_size, self.dtype)
        return KVPool(layout, NUM_PAGES, torch.device("cpu"))

    def tensor(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype)

    def states(self, n: int) -> None:
        """Run a delta net between its products, and store K that is rotated in part."""
        x, z = self._delta_net(n, self._rows(n, n))
        gated_rms_norm(x, z, self.tensor(NET.value_dim), 1e-6)
        heads = 16 + 2 * ATTENTION.kv_heads
        norm = torch.empty(ATTENTION.head_dim)
        rope_and_store(
            self.tensor(n, heads * ATTENTION.head_dim),
            torch.empty(2, n, ROTATED),
            self.pool.layers[3],
            torch.empty(n, dtype=torch.int64),
            q_norm=norm,
            k_norm=norm,
            eps=1e-6,
        )

    def prompts(self, n: int) -> None:
        """Run the recurrence of a delta net over prompts, beside decode rows."""
        self._delta_net(PROMPT_TOKENS + n, self._rows(n + 1, n))

    def _delta_net(self, num_tokens: int, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the outputs of the rule, and their gates."""
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
