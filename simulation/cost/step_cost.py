"""Costs of one node: step times, modelled or measured, transfer times, and sizes."""

from pathlib import Path
from typing import Protocol

import msgspec

from simulation.cost.kernels import BYTES, GPUS, TP_SIZES, Gpu, all_reduce_s, delta_net_s
from simulation.cost.measured import BAND, MeasuredTimes, StepTable
from simulation.cost.models import KvShape, ModelShape, StepShape, model_shape

_LAUNCHES_S = 5 * 2.5e-6  # seconds per layer: norms, rotation, writing KV, activation
_FEW_TOKENS = 16  # up to this many tokens of a row, attention reads its KV once, as for one token
_SAMPLING_S = 0.1e-3
_CPU_S = 80e-6  # seconds of the scheduler, which the device hides unless its step is even shorter


class ModelledTimes:
    """Step times of a model on `tp` equal GPUs."""

    def __init__(self, gpu: Gpu, model: ModelShape, tp: int) -> None:
        self._gpu, self._model, self._tp = gpu, model, tp
        self._width = model.heads // tp * model.head_dim
        self._kv_heads = max(1, model.kv_heads // tp)
        self._kv_width = self._kv_heads * model.head_dim

    def step_s(self, shape: StepShape) -> float:
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
        """Return the attention time of one layer with at most `window` visible tokens."""
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


_MEMORY_SHARE = 0.9  # share of a GPU's memory for weights and KV
_OTHER_BYTES = 3 << 30  # memory of a GPU for activations, graphs and communication
_WIDE_BAND = 0.3  # for models with experts, whose tables differ, and with parts without tables
_SET_UP_S = 0.2e-3  # seconds to set up a transfer
_HOST_BYTES_PER_S = 50e9  # between a GPU and host memory, over PCIe 5
_COPY_BYTES_PER_S = 10e9  # within host memory
# Bytes/s of a node's network port, and the share of it that transfers reach.
_PATHS = {
    "nvlink": 450e9 * 0.73,
    "rdma400": 50e9 * 0.73,
    "tcp100": 12.5e9 * 0.5,
    "tcp25": 3.1e9 * 0.5,
}
PATHS = tuple(_PATHS)


class StepTimes(Protocol):
    """Source of step times: a model of kernels, or a file of measurements."""

    def step_s(self, shape: StepShape) -> float: ...


class StepCost(msgspec.Struct, frozen=True):
    """Costs of one node.

    Attributes:
        kv: KV of all ranks, with each head once.
        weight_bytes: weights of all ranks.
        kv_capacity_tokens: KV tokens inside windows that fit in the memory left by the weights.
        vocabulary: number of token ids of the model.
        context_length: maximum tokens of a request.
        band: expected relative error of step_s.
        host_bytes_per_s: speed of copies between the device and host memory.
        has_drafts: step_s supports steps that verify drafts.
    """

    times: StepTimes
    kv: KvShape
    weight_bytes: int
    kv_capacity_tokens: int
    vocabulary: int
    context_length: int
    band: float
    host_bytes_per_s: float
    has_drafts: bool = True

    @staticmethod
    def of(gpu: str, model: str, tp: int = 1) -> "StepCost":
        """Return the costs of a model on `tp` GPUs of one kind.

        Args:
            gpu: name of a GPU, or a file of `baton bench steps`.

        Raises:
            ValueError: the GPU, the model or this number of ranks is not supported.
        """
        if gpu in GPUS:
            return _modelled(gpu, model, tp)
        if Path(gpu).is_file():
            return _measured(Path(gpu), model, tp)
        raise ValueError(
            f"gpu {gpu!r} is not supported: expected a file of `baton bench steps`, or one of "
            f"{', '.join(GPUS)}"
        )

    def step_s(self, shape: StepShape) -> float:
        return self.times.step_s(shape)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.kv.token_bytes

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages that fit in the memory that the weights leave."""
        return self.kv_capacity_tokens * self.kv.token_bytes // self.kv.page_bytes(page_size)

    def host_copy_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy between the device and host memory."""
        return num_bytes / self.host_bytes_per_s

    def transfer_s(self, num_bytes: int, path: str) -> float:
        """Return the seconds of a transfer between two otherwise idle nodes.

        Raises:
            ValueError: `path` is not in PATHS.
        """
        if path not in _PATHS:
            raise ValueError(f"path {path!r} is not supported: expected one of {', '.join(PATHS)}")
        return _SET_UP_S + num_bytes / _PATHS[path]


def _modelled(gpu: str, model: str, tp: int) -> StepCost:
    if tp not in TP_SIZES:
        raise ValueError(f"tp {tp} is not supported: expected one of {TP_SIZES}")
    device, shape = GPUS[gpu], model_shape(model)
    if shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        raise ValueError(
            f"tp {tp} does not divide the {shape.heads} heads and {shape.kv_heads} KV heads of "
            f"{model!r}"
        )
    kv = shape.kv.token_bytes
    weights = shape.parameters * BYTES
    copies = max(1, tp // shape.kv_heads)  # copies of each KV head
    free = tp * (int(_MEMORY_SHARE * device.sheet.memory_bytes) - _OTHER_BYTES) - weights
    if free < kv * copies:
        raise ValueError(
            f"model {model!r} does not fit on {tp} GPUs {gpu!r}: {weights / 2**30:.1f} GiB of "
            f"weights, {(free + weights) / 2**30:.1f} GiB of memory for them and KV"
        )
    is_usual = shape.kv.is_uniform and not shape.experts
    return StepCost(
        times=ModelledTimes(device, shape, tp),
        kv=shape.kv,
        weight_bytes=weights,
        kv_capacity_tokens=free // (kv * copies),
        vocabulary=shape.vocabulary,
        context_length=shape.context_length,
        band=max(device.band, 0.0 if is_usual else _WIDE_BAND),
        host_bytes_per_s=tp * _HOST_BYTES_PER_S,
    )


def _measured(file: Path, model: str, tp: int) -> StepCost:
    table = StepTable.read(file)
    if Path(model).name != table.model:
        raise ValueError(f"{file} has step times of model {table.model!r}, not of {model!r}")
    if tp != 1:
        raise ValueError(f"tp {tp} is not supported: {file} has step times of one rank")
    return StepCost(
        times=MeasuredTimes(table),
        kv=KvShape(table.kv_bytes_per_token, full=1),
        weight_bytes=table.weight_bytes,
        kv_capacity_tokens=table.kv_capacity_tokens,
        vocabulary=table.vocabulary,
        context_length=table.context_length,
        band=BAND,
        host_bytes_per_s=_COPY_BYTES_PER_S,
        has_drafts=False,
    )
