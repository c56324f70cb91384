"""The duration of a step as the sum of its kernels."""

from simulation.cost.gpus import Gpu
from simulation.cost.kernels import BYTES, all_reduce_s
from simulation.cost.models import ModelShape
from simulation.cost.step_shape import StepShape

_LAUNCHES_S = 5 * 2.5e-6  # of a layer: norms, rotation, the write of KV, activation
_SAMPLING_S = 0.1e-3
_CPU_S = 80e-6  # of the scheduler. The device hides it unless its step is even shorter


class ModelledTimes:
    """Step times of a model on `tp` equal GPUs."""

    def __init__(self, gpu: Gpu, model: ModelShape, tp: int) -> None:
        self._gpu, self._model, self._tp = gpu, model, tp
        self._width = model.heads // tp * model.head_dim
        self._kv_heads = max(1, model.kv_heads // tp)
        self._kv_width = self._kv_heads * model.head_dim

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        rows, tokens = len(shape.new_tokens), sum(shape.new_tokens)
        if not tokens:
            return _CPU_S
        hidden = self._model.hidden
        layer = self._product_s(tokens, self._width + 2 * self._kv_width, hidden)
        layer += self._product_s(tokens, hidden, self._width)
        layer += self._experts_s(tokens) if self._model.experts else self._mlp_s(tokens)
        layer += self._attention_s(shape) + _LAUNCHES_S
        layer += 2 * all_reduce_s(self._tp, tokens * hidden * BYTES)
        head = self._product_s(rows, self._model.vocabulary // self._tp, hidden)
        return max(_CPU_S, self._model.layers * layer + head + _SAMPLING_S)

    def _product_s(self, m: int, n: int, k: int) -> float:
        return self._gpu.product.seconds(self._gpu.sheet, m, n, k)

    def _attention_s(self, shape: StepShape) -> float:
        sheet, decode, prefill = self._gpu.sheet, self._gpu.decode, self._gpu.prefill
        decoding, decode_rows, prefill_s = 0, 0, 0.0
        for new, context in zip(shape.new_tokens, shape.contexts, strict=True):
            if new == 1:
                decode_rows += 1
                decoding += context
            else:
                prefill_s += prefill.row_seconds(sheet, context - new, context, self._width)
        total = prefill_s + prefill.start_us * 1e-6 if prefill_s else 0.0
        if decode_rows:
            kv_bytes, tiles = decoding * 2 * self._kv_width * BYTES, decode_rows * self._kv_heads
            total += decode.seconds(sheet, kv_bytes, tiles)
        return total

    def _mlp_s(self, tokens: int) -> float:
        hidden, inner = self._model.hidden, self._model.intermediate // self._tp
        return self._product_s(tokens, 2 * inner, hidden) + self._product_s(tokens, hidden, inner)

    def _experts_s(self, tokens: int) -> float:
        model, gpu = self._model, self._gpu
        router = self._product_s(tokens, model.experts, model.hidden)
        sizes = model.hidden, model.intermediate // self._tp, model.experts_per_token
        return router + gpu.experts.seconds(gpu.sheet, tokens, *sizes, model.experts)
