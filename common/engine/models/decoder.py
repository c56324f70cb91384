"""The forward of a dense decoder: Llama, Mistral, Qwen and Gemma differ in a few numbers."""

import torch
from torch import Tensor

from common.engine.memory.kv import KVPool
from common.engine.models.spec import ModelSpec
from common.engine.models.weights import LayerWeights, Weights
from common.engine.rows.forward import ForwardBatch
from kernels.act_and_mul import act_and_mul
from kernels.attention import AttentionPlan, paged_attention, plan_attention
from kernels.embedding import embed
from kernels.rms_norm import add_rms_norm
from kernels.rope import rope_angles
from kernels.rope_and_store import rope_and_store


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
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()

    def forward(self, batch: ForwardBatch, pool: KVPool, future_tokens: Tensor) -> Tensor:
        """Computes a step and writes K and V of its tokens into their pages.

        Never waits for the device, and launches the same kernels on the same addresses for
        batches of the same shapes at the same addresses: it can be captured as a graph.

        Args:
            future_tokens: int32 [num_slots], the last token sampled in every slot.
        Returns:
            Hidden states of batch.sampled, [num_sampled, hidden], for `logits`.
        """
        weights, eps = self._weights, self.spec.rms_norm_eps
        angles = rope_angles(batch.positions, self._inverse_frequencies, self.spec.rope.scale)
        plans = self._plans(batch, pool)
        x = embed(batch.token_ids, future_tokens, weights.embedding)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        residual: Tensor | None = None
        for layer, window, kv in zip(weights.layers, self.spec.windows, pool.layers, strict=True):
            x, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(x, layer, angles, kv, batch.locations, plans[window])
            x, residual = add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._mlp(x, layer)
        x, _ = add_rms_norm(x, residual, weights.norm, eps, rows=batch.sampled)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] in the model's dtype, or in float32 where they are soft-capped."""
        logits = self._weights.head.apply(hidden)
        cap = self.spec.logit_soft_cap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

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
            layer.qkv.apply(x),
            angles,
            kv,
            locations,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.spec.rms_norm_eps,
        )
        spec = self.spec
        x = paged_attention(q, kv, plan, scale=spec.attention_scale, soft_cap=spec.soft_cap)
        x = layer.output.apply(x)
        return self._normed(x, layer.attention_post_norm)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        x = layer.gate_up.apply(x)
        x = layer.down.apply(act_and_mul(x, self.spec.activation))
        return self._normed(x, layer.mlp_post_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else add_rms_norm(x, None, weight, self.spec.rms_norm_eps)[0]

    def _plans(self, batch: ForwardBatch, pool: KVPool) -> dict[int | None, AttentionPlan]:
        return {
            window: plan_attention(
                batch.page_ids,
                batch.page_starts,
                batch.query_starts,
                batch.lengths,
                pool.layers[0],
                num_heads=self.spec.num_heads,
                num_tokens=batch.token_ids.shape[0],
                num_decodes=batch.num_decodes,
                window=window,
            )
            for window in set(self.spec.windows)
        }
