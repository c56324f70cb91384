"""The duration of a step as the sum of its kernels."""

from simulation.cost.gpus import Gpu
from simulation.cost.kernels import BYTES, all_reduce_s, delta_net_s
from simulation.cost.models import ModelShape
from simulation.cost.step_shape import StepShape

_LAUNCHES_S = 5 * 2.5e-6  # of a layer: norms, rotation, the write of KV, activation
_FEW_TOKENS = 16  # of a row, whose attention reads its KV once as for one token
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
        model, tokens = self._model, sum(shape.new_tokens)
        if not tokens:
            return _CPU_S
        total = model.layers * self._ffn_s(tokens)
        if attending := model.full + model.windowed:
            total += attending * self._projections_s(tokens)
            total += model.full * self._attention_s(shape, max(shape.contexts))
            if model.windowed:
                total += model.windowed * self._attention_s(shape, model.window)
        if model.recurrent:
            total += model.recurrent * self._delta_net_s(len(shape.new_tokens), tokens)
        head = self._product_s(len(shape.new_tokens), model.vocabulary // self._tp, model.hidden)
        return max(_CPU_S, total + head + _SAMPLING_S)

    def _product_s(self, m: int, n: int, k: int) -> float:
        return self._gpu.product.seconds(self._gpu.sheet, m, n, k)

    def _ffn_s(self, tokens: int) -> float:
        """Return the time of the parts that all layers have."""
        model = self._model
        ffn = self._experts_s(tokens) if model.experts else self._mlp_s(tokens, model.intermediate)
        if model.shared:
            ffn += self._mlp_s(tokens, model.shared)
        return ffn + _LAUNCHES_S + 2 * all_reduce_s(self._tp, tokens * model.hidden * BYTES)

    def _projections_s(self, tokens: int) -> float:
        hidden = self._model.hidden
        projected = self._product_s(tokens, self._width + 2 * self._kv_width, hidden)
        return projected + self._product_s(tokens, hidden, self._width)

    def _attention_s(self, shape: StepShape, window: int) -> float:
        """Return the time of one layer whose tokens see at most so many tokens."""
        sheet, decode, prefill = self._gpu.sheet, self._gpu.decode, self._gpu.prefill
        decoding, decode_rows, prefill_s = 0, 0, 0.0
        for new, context in zip(shape.new_tokens, shape.contexts, strict=True):
            if new <= _FEW_TOKENS:
                decode_rows += 1
                decoding += min(context, window)
            else:
                begin = context - new
                prefill_s += prefill.row_seconds(sheet, begin, context, self._width, window)
        total = prefill_s + prefill.start_us * 1e-6 if prefill_s else 0.0
        if decode_rows:
            kv_bytes, tiles = decoding * 2 * self._kv_width * BYTES, decode_rows * self._kv_heads
            total += decode.seconds(sheet, kv_bytes, tiles)
        return total

    def _delta_net_s(self, rows: int, tokens: int) -> float:
        """Return the time of one delta-net."""
        net, hidden = self._model.delta_net, self._model.hidden
        products = self._product_s(tokens, net.projected // self._tp, hidden)
        products += self._product_s(tokens, hidden, net.value_heads * net.value_dim // self._tp)
        state_bytes = net.state_bytes // self._tp
        return products + delta_net_s(self._gpu.sheet, rows, tokens, state_bytes)

    def _mlp_s(self, tokens: int, intermediate: int) -> float:
        hidden, inner = self._model.hidden, intermediate // self._tp
        return self._product_s(tokens, 2 * inner, hidden) + self._product_s(tokens, hidden, inner)

    def _experts_s(self, tokens: int) -> float:
        model, gpu = self._model, self._gpu
        router = self._product_s(tokens, model.experts, model.hidden)
        sizes = model.hidden, model.intermediate // self._tp, model.experts_per_token
        return router + gpu.experts.seconds(gpu.sheet, tokens, *sizes, model.experts)
