"""What a dense decoder is, independent of who made it: the numbers its forward needs."""

from dataclasses import dataclass

import torch

from common.engine.memory.kv import PagedKV
from kernels.act_and_mul import Activation


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies: [head_dim / 2]; scale multiplies cosines and sines."""

    inverse_frequencies: tuple[float, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One of Llama, Mistral, Qwen2, Qwen3 or Gemma 2, as its configuration says.

    embedding_scale: multiplies embeddings, rounded to the dtype that is computed in.
    windows: per layer, how many tokens back it sees, its own included; None: all.
    attention_scale: multiplies the products of queries and keys.
    soft_cap: attention scores are soft_cap * tanh(score / soft_cap); None: as they are.
    logit_soft_cap: the same of logits.
    post_norms: attention's and the MLP's outputs are normed too, before they are added.
    norms_from_one: stored weights of norms are differences from 1.
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
    embedding_scale: float
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    attention_scale: float
    soft_cap: float | None
    logit_soft_cap: float | None
    activation: Activation
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    norms_from_one: bool
    dtype: torch.dtype
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def layers(self) -> tuple[PagedKV, ...]:
        """The state that each layer keeps: pool, layout and hand-off derive from it."""
        return (PagedKV(self.kv_heads, self.head_dim),) * self.num_layers
