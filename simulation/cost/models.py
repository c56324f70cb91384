"""The dimensions of models: a table by name, and checkpoint directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_MAX_BYTES = 1 << 20  # of a config.json
_MAX_SIZE = 1 << 24
_EXPERTS = ("num_local_experts", "num_experts")  # fields with the number of experts
# Fields of config.json whose models are computed in a way that the cost model lacks.
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention",
    "quantization_config": "quantized weights",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "dense layers before layers with experts",
    "mlp_only_layers": "layers without experts among those with experts",
}


class ModelShape(msgspec.Struct, frozen=True):
    """The dimensions of a decoder with grouped-query attention in every layer, in bfloat16.

    Attributes:
        intermediate: hidden size of the MLP, or of each expert.
        experts: 0 in a dense model.
        experts_per_token: 0 in a dense model.
        tied: whether the head and the embeddings share their weights.
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

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Return the parameters of one MLP or expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        experts = max(1, self.experts) * self.mlp_parameters + self.hidden * self.experts
        layer = self.attention_parameters + experts + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden


MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600, 151936, 40960),
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 768, 151936, 40960, 128, 8),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2),
}


def model_shape(model: str) -> ModelShape:
    """Return the dimensions of a model in MODELS, or of a checkpoint directory.

    Raises:
        ValueError: the model is unknown, or the cost model lacks a part of it.
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
    _check_attention(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    experts = next((_size(config, name) for name in _EXPERTS if config.get(name)), 0)
    per_token = _size(config, "num_experts_per_tok") if experts else 0
    if per_token > experts:
        raise ValueError(f"num_experts_per_tok is {per_token}, but there are {experts} experts")
    own_inner = experts and config.get("moe_intermediate_size")
    return ModelShape(
        layers=_size(config, "num_hidden_layers"),
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
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    size = config.get(name)
    size = default if size is None else size
    if type(size) is not int or not 0 < size <= _MAX_SIZE:
        raise ValueError(f"{name} is {size!r}: expected an integer from 1 to {_MAX_SIZE}")
    return size


def _check_attention(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless every layer attends all tokens."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        kinds.add("sliding_attention")
    if kinds:
        raise ValueError(f"the cost model does not support layers of {', '.join(sorted(kinds))}")
