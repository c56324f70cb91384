"""Dimensions of models, from a table or a checkpoint, and the shapes of their steps and KV.

KV is laid out in pages as in `engine.kv_cache.layout`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.page_tables import PageTables
from simulation.cost.kernels import BYTES

_MAX_PADDING = 0.05  # highest share of unused bytes in a request's pages, at each of these lengths
_TYPICAL_TOKENS = (2 << 10, 8 << 10, 32 << 10)


class KvShape(msgspec.Struct, frozen=True):
    """The KV of a request.

    Attributes:
        layer_bytes: bytes of a token in one layer, with the heads of all ranks.
        full: number of layers with the KV of all tokens.
        windowed: number of layers with the KV of a window.
        window: size of the window in tokens.
        state_bytes: bytes of the recurrent state of all other layers.
    """

    layer_bytes: int
    full: int
    windowed: int = 0
    window: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in all layers, if it is inside the window."""
        return self.layer_bytes * (self.full + self.windowed)

    @property
    def is_uniform(self) -> bool:
        """Return whether each token of a request takes the same memory."""
        return not (self.windowed or self.state_bytes)

    def page_bytes(self, page_size: int) -> int:
        return self._layers_per_page(page_size) * self.layer_bytes * page_size

    def tables(self, page_size: int) -> PageTables:
        tables = self._tables(page_size, self._layers_per_page(page_size))
        state_pages = -(-self.state_bytes // self.page_bytes(page_size))
        return PageTables(page_size, tables.windows, state_pages)

    def _layers_per_page(self, page_size: int) -> int:
        """Return the number of layers in the largest page that wastes little memory."""
        if not self.windowed:
            return self.full
        counts = range(1, max(self.full, self.windowed) + 1)
        padding = {count: self._padding(page_size, count) for count in counts}
        lean = [count for count in counts if padding[count] <= _MAX_PADDING]
        return max(lean) if lean else min(counts, key=lambda count: padding[count])

    def _tables(self, page_size: int, layers_per_page: int) -> PageTables:
        full = (None,) * -(-self.full // layers_per_page)
        return PageTables(page_size, full + (self.window,) * -(-self.windowed // layers_per_page))

    def _padding(self, page_size: int, layers_per_page: int) -> float:
        """Return the unused bytes per used byte, for the worst of the typical lengths."""
        tables = self._tables(page_size, layers_per_page)
        return (
            max(
                layers_per_page
                * tables.pages_for(num_tokens)
                / self._layer_pages(tables, num_tokens)
                for num_tokens in _TYPICAL_TOKENS
            )
            - 1
        )

    def _layer_pages(self, tables: PageTables, num_tokens: int) -> int:
        num_pages = tables.num_pages(num_tokens)
        live = num_pages - tables.live_from(tables.num_tables - 1, num_tokens)
        return self.full * num_pages + self.windowed * live


class StepShape(msgspec.Struct, frozen=True):
    """The rows of one forward pass.

    Attributes:
        new_tokens: number of tokens that the step computes, by row. 1 in a decode row.
        contexts: KV tokens after the step, by row.
    """

    new_tokens: tuple[int, ...]
    contexts: tuple[int, ...]


_MAX_BYTES = 1 << 20  # size limit of a config.json
_MAX_SIZE = 1 << 24
_MAX_LAYERS = 1024
_STATE_BYTES = 4  # bytes of a number in a recurrent state
_FULL = "full_attention"
_KINDS = (_FULL, "sliding_attention", "linear_attention")
_EXPERTS = ("num_local_experts", "num_experts")  # fields with the number of experts
# Fields of config.json of models that the cost model does not support.
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention",
    "quantization_config": "quantized weights",
    "n_shared_experts": "shared experts",
    "first_k_dense_replace": "dense layers before layers with experts",
    "mlp_only_layers": "layers without experts among those with experts",
}


class DeltaNetShape(msgspec.Struct, frozen=True):
    """Dimensions of a gated delta-net, a layer that has a recurrent state instead of KV.

    Attributes:
        width: tokens of its convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Return the query, key and value channels of a token, which pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Return the size of a token's projections: channels, gates, two numbers per head."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the convolution and of the state, which is float32."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return matrices * _STATE_BYTES + self.channels * (self.width - 1) * BYTES


NO_DELTA_NET = DeltaNetShape(0, 0, 0, 0, 1)


class ModelShape(msgspec.Struct, frozen=True):
    """Dimensions of a decoder with grouped-query attention, in bfloat16.

    Attributes:
        intermediate: hidden size of the MLP, or of each expert.
        experts: 0 for a dense model.
        experts_per_token: 0 for a dense model.
        tied: the head and the embeddings share their weights.
        shared: hidden size of the expert that all tokens use. 0: none.
        windowed: number of layers with sliding-window attention.
        window: size of the window in tokens, including a token itself.
        recurrent: number of layers with a delta-net instead of attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context_length: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    shared: int = 0
    windowed: int = 0
    window: int = 0
    recurrent: int = 0
    delta_net: DeltaNetShape = NO_DELTA_NET

    @property
    def full(self) -> int:
        """Return the number of layers with full attention."""
        return self.layers - self.windowed - self.recurrent

    @property
    def kv(self) -> KvShape:
        layer_bytes = 2 * self.kv_heads * self.head_dim * BYTES
        state_bytes = self.recurrent * self.delta_net.state_bytes
        return KvShape(layer_bytes, self.full, self.windowed, self.window, state_bytes)

    @property
    def attention_parameters(self) -> int:
        """Return the number of attention parameters in one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def recurrent_parameters(self) -> int:
        """Return the number of parameters of one delta-net."""
        net = self.delta_net
        return self.hidden * (net.projected + net.value_heads * net.value_dim)

    @property
    def mlp_parameters(self) -> int:
        """Return the number of parameters of one MLP or expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        experts = max(1, self.experts) * self.mlp_parameters + self.hidden * self.experts
        layer = experts + 3 * self.hidden * self.shared + 2 * self.hidden
        mixers = (self.layers - self.recurrent) * self.attention_parameters
        mixers += self.recurrent * self.recurrent_parameters
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * layer + mixers + embeddings


MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600, 151936, 40960),
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 768, 151936, 40960, 128, 8),
    "qwen3-next-80b-a3b": ModelShape(
        *(48, 2048, 16, 2, 256, 512, 151936, 262144, 512, 10),
        shared=512,
        recurrent=36,
        delta_net=DeltaNetShape(16, 32, 128, 128, 4),
    ),
    "gemma-3-12b": ModelShape(
        *(48, 3840, 16, 8, 256, 15360, 262208, 131072), tied=True, windowed=40, window=1024
    ),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2),
}


def model_shape(model: str) -> ModelShape:
    """Return the dimensions of a model in MODELS, or of a checkpoint directory.

    Raises:
        ValueError: the model is unknown, or the cost model does not support a part of it.
    """
    if model in MODELS:
        return MODELS[model]
    file = Path(model) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model {model!r} is unknown: expected a directory with config.json, or one of "
            f"{', '.join(MODELS)}"
        )
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return _shape_of(msgspec.convert(config.get("text_config") or config, dict[str, Any]))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None


def _shape_of(config: Mapping[str, Any]) -> ModelShape:
    for field, what in _UNSUPPORTED.items():
        if config.get(field):
            raise ValueError(f"{field}: the cost model does not support {what}")
    kinds = _layer_kinds(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    experts = next((_size(config, name) for name in _EXPERTS if config.get(name)), 0)
    per_token = _size(config, "num_experts_per_tok") if experts else 0
    if per_token > experts:
        raise ValueError(f"num_experts_per_tok is {per_token}, but there are {experts} experts")
    own_inner = experts and config.get("moe_intermediate_size")
    shared = config.get("shared_expert_intermediate_size")
    windowed, recurrent = kinds.count("sliding_attention"), kinds.count("linear_attention")
    return ModelShape(
        layers=len(kinds),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate=_size(config, "moe_intermediate_size" if own_inner else "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        context_length=_size(config, "max_position_embeddings"),
        experts=experts,
        experts_per_token=per_token,
        tied=bool(config.get("tie_word_embeddings", False)),
        shared=_size(config, "shared_expert_intermediate_size") if shared else 0,
        windowed=windowed,
        window=_size(config, "sliding_window") if windowed else 0,
        recurrent=recurrent,
        delta_net=_delta_net(config) if recurrent else NO_DELTA_NET,
    )


def _delta_net(config: Mapping[str, Any]) -> DeltaNetShape:
    return DeltaNetShape(
        key_heads=_size(config, "linear_num_key_heads"),
        value_heads=_size(config, "linear_num_value_heads"),
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        width=_size(config, "linear_conv_kernel_dim"),
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    size = config.get(name)
    size = default if size is None else size
    if type(size) is not int or not 0 < size <= _MAX_SIZE:
        raise ValueError(f"{name} is {size!r}: expected an integer from 1 to {_MAX_SIZE}")
    return size


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. Raises ValueError for an unsupported kind."""
    number = _size(config, "num_hidden_layers")
    if number > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {number}: expected at most {_MAX_LAYERS}")
    kinds = config.get("layer_types")
    if kinds is None and (every := config.get("full_attention_interval")):
        kinds = _every(number, every, "linear_attention")
    elif kinds is None and (every := config.get("sliding_window_pattern")):
        kinds = _every(number, every, "sliding_attention")
    elif kinds is None and config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError("sliding_window: the layers with a window are not in layer_types")
    kinds = [_FULL] * number if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != number:
        raise ValueError(f"layer_types: expected {number} of {', '.join(_KINDS)}")
    if unknown := sorted({str(kind) for kind in kinds} - set(_KINDS)):
        raise ValueError(f"the cost model does not support layers of {', '.join(unknown)}")
    if "linear_attention" in kinds and _FULL not in kinds:
        raise ValueError("layer_types: a model without attention is not supported")
    return kinds


def _every(number: int, every: Any, others: str) -> list[str]:
    """Return `number` layers of kind `others`, except that every n-th one has full attention."""
    if type(every) is not int or every < 1:
        raise ValueError(f"the interval of full attention is {every!r}: expected an integer")
    return [others if (layer + 1) % every else _FULL for layer in range(number)]
