"""The duration of a step as the sum of its kernels."""

from simulation.cost.gpus import Gpu
from simulation.cost.kernels import (
    BYTES,
    PREFILL_ATTENTION_START_S,
    all_reduce_s,
    decode_attention_s,
    experts_s,
    gemm_s,
    prefill_attention_s,
)
from simulation.cost.models import ModelShape
from simulation.cost.step_shape import StepShape

_LAUNCHES = 5 * 2.5e-6  # per layer: norms, rotation, the write of KV, activation
_SAMPLING_S = 0.1e-3
_CPU_S = 80e-6  # of a step. Hidden by the device's time of the step before, if that is longer


class ModelledTimes:
    """Step times of a model on `tp` equal GPUs."""

    def __init__(self, gpu: Gpu, model: ModelShape, tp: int) -> None:
        self._gpu, self._model, self._tp = gpu, model, tp
        self._width = model.heads // tp * model.head_dim
        self._kv_width = max(1, model.kv_heads // tp) * model.head_dim

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        rows, tokens = len(shape.new_tokens), sum(shape.new_tokens)
        if not tokens:
            return _CPU_S
        layer = self._projections_s(tokens) + self._attention_s(shape) + _LAUNCHES
        layer += self._experts_s(tokens) if self._model.experts else self._mlp_s(tokens)
        layer += 2 * all_reduce_s(self._tp, tokens * self._model.hidden * BYTES)
        head = gemm_s(self._gpu, rows, self._model.vocabulary // self._tp, self._model.hidden)
        return max(_CPU_S, self._model.layers * layer + head + _SAMPLING_S)

    def _projections_s(self, tokens: int) -> float:
        hidden, out = self._model.hidden, self._width + 2 * self._kv_width
        return gemm_s(self._gpu, tokens, out, hidden) + gemm_s(
            self._gpu, tokens, hidden, self._width
        )

    def _attention_s(self, shape: StepShape) -> float:
        gpu, width = self._gpu, self._width
        decoding, prefills, prefill_s = 0, 0, 0.0
        for new, context in zip(shape.new_tokens, shape.contexts, strict=True):
            if new == 1:
                decoding += context
            else:
                prefills += 1
                prefill_s += prefill_attention_s(gpu, context - new, context, width)
        total = prefill_s + PREFILL_ATTENTION_START_S if prefills else 0.0
        if decoding:
            total += decode_attention_s(gpu, decoding * 2 * self._kv_width * BYTES)
        return total

    def _mlp_s(self, tokens: int) -> float:
        hidden, inner = self._model.hidden, self._model.intermediate // self._tp
        return gemm_s(self._gpu, tokens, 2 * inner, hidden) + gemm_s(
            self._gpu, tokens, hidden, inner
        )

    def _experts_s(self, tokens: int) -> float:
        model = self._model
        share = model.experts_per_token / model.experts
        touched = model.experts * (1 - (1 - share) ** tokens)
        expert = model.mlp_parameters / self._tp
        flops = 2 * tokens * model.experts_per_token * expert
        router = gemm_s(self._gpu, tokens, model.experts, model.hidden)
        return router + experts_s(self._gpu, touched * expert * BYTES, flops)
