"""What a dense decoder is, independent of who made it: the numbers its forward needs."""

from dataclasses import dataclass

import torch

from common.engine.kv import PagedKV


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies: [head_dim / 2]; scale multiplies cosines and sines."""

    inverse_frequencies: tuple[float, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One of Llama, Mistral, Qwen2 or Qwen3, as its configuration says.

    windows: per layer, how many tokens back it sees, its own included; None: all.
    dtype: of the checkpoint.
    context_length: tokens that the model was made for.
    """

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def layers(self) -> tuple[PagedKV, ...]:
        """The state that each layer keeps: pool, layout and hand-off derive from it."""
        return (PagedKV(self.kv_heads, self.head_dim),) * self.num_layers
