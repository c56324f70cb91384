"""The forward of a dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ in a few flags."""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.forward import ForwardBatch
from common.engine.kv import KVPool
from common.engine.models.spec import ModelSpec
from common.engine.models.weights import LayerWeights, Weights
from kernels.attention import AttentionPlan, paged_attention, plan_attention
from kernels.embedding import embed
from kernels.rms_norm import add_rms_norm
from kernels.rope import rope_angles
from kernels.rope_and_store import rope_and_store
from kernels.silu_and_mul import silu_and_mul


class DenseDecoder:
    """Weights and the one call that uses them. Stateless: KV is in the pool it is given."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._inverse_frequencies = torch.tensor(
            spec.rope.inverse_frequencies, dtype=torch.float32, device=self.device
        )
        self._attention_scale = spec.head_dim**-0.5

    def forward(self, batch: ForwardBatch, pool: KVPool, future_tokens: Tensor) -> Tensor:
        """Computes a step and writes K and V of its tokens into their pages.

        Args:
            future_tokens: int32 [num_slots], the last token sampled in every slot.
        Returns:
            Logits of batch.sampled, float32 [num_sampled, vocabulary].
        """
        weights, eps = self._weights, self.spec.rms_norm_eps
        angles = rope_angles(batch.positions, self._inverse_frequencies, self.spec.rope.scale)
        plans = self._plans(batch, pool)
        x = embed(batch.token_ids, future_tokens, weights.embedding)
        residual: Tensor | None = None
        for layer, window, kv in zip(weights.layers, self.spec.windows, pool.layers, strict=True):
            x, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(x, layer, angles, kv, batch.locations, plans[window])
            x, residual = add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = silu_and_mul(F.linear(x, layer.gate_up, layer.gate_up_bias))
            x = F.linear(x, layer.down, layer.down_bias)
        x = x.index_select(0, batch.sampled)
        if residual is not None:
            residual = residual.index_select(0, batch.sampled)
        x, _ = add_rms_norm(x, residual, weights.norm, eps)
        return F.linear(x, weights.head).float()

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        angles: Tensor,
        kv: Tensor,
        locations: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        q = rope_and_store(
            F.linear(x, layer.qkv, layer.qkv_bias),
            angles,
            kv,
            locations,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.spec.rms_norm_eps,
        )
        x = paged_attention(q, kv, plan, scale=self._attention_scale)
        return F.linear(x, layer.output, layer.output_bias)

    def _plans(self, batch: ForwardBatch, pool: KVPool) -> dict[int | None, AttentionPlan]:
        return {
            window: plan_attention(
                batch.page_table,
                batch.query_starts,
                batch.lengths,
                page_size=pool.layout.page_size,
                page_bytes=pool.layout.layer_page_bytes,
                window=window,
            )
            for window in set(self.spec.windows)
        }
