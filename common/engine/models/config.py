"""config.json of a Hugging Face checkpoint -> ModelSpec, in the forms of transformers 4 and 5.

A default here is the default of that architecture's configuration class in transformers.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from common.engine.models.fields import Fields
from common.engine.models.rope import extended_context, parse_rope
from common.engine.models.spec import ModelSpec
from common.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def read_spec(directory: Path) -> ModelSpec:
    """Reads config.json and generation_config.json.

    Raises:
        ConfigError: missing or wrong fields, or something that is not supported; the message
            names the file, the field and what would be right.
    """
    config = Fields.of(directory / "config.json")
    parse = _PARSERS.get(config.text("model_type"))
    if parse is None:
        supported = ", ".join(_PARSERS)
        raise ConfigError(
            f"{directory}: model_type {config.text('model_type')!r} is not supported; "
            f"{supported} are"
        )
    if "quantization_config" in config:
        raise ConfigError(f"{directory}: quantised checkpoints are not supported")
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "silu")
    return parse(config, _eos_token_ids(directory, config))


def _llama(config: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _spec(
        config,
        eos_token_ids,
        architecture="llama",
        head_dim=_even_head_dim(config),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    # An explicit null switches the window off; transformers fills an absent field with 4096.
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    return _spec(
        config,
        eos_token_ids,
        architecture="mistral",
        head_dim=_even_head_dim(config),
        windows=(window,) * config.integer("num_hidden_layers"),
    )


def _qwen2(config: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    return _spec(
        config,
        eos_token_ids,
        architecture="qwen2",
        head_dim=_even_head_dim(config),
        qkv_bias=True,
        windows=_qwen_windows(config),
    )


def _qwen3(config: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _spec(
        config,
        eos_token_ids,
        architecture="qwen3",
        head_dim=config.integer("head_dim", 128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(config),
    )


_PARSERS: dict[str, Callable[[Fields, tuple[int, ...]], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _spec(
    config: Fields,
    eos_token_ids: tuple[int, ...],
    *,
    architecture: str,
    head_dim: int,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {num_heads} heads")
    if head_dim % 2:
        raise ConfigError(f"{architecture}: an odd head_dim ({head_dim}) is not supported")
    context_length = config.integer("max_position_embeddings")
    name = "dtype" if "dtype" in config else "torch_dtype"
    dtype = _DTYPES.get(config.text(name, "float32"))
    if dtype is None:
        raise config.wrong(name, "one of " + ", ".join(_DTYPES))
    return ModelSpec(
        architecture=architecture,
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config, head_dim, context_length),
        windows=windows or (None,) * num_layers,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=dtype,
        context_length=extended_context(config, context_length),
        eos_token_ids=eos_token_ids,
    )


def _even_head_dim(config: Fields) -> int:
    even = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", even)


def _qwen_windows(config: Fields) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False) or config.is_null("sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    if "layer_types" not in config:
        first = config.count("max_window_layers", 28)
        return tuple(None if layer < first else window for layer in range(num_layers))
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= set(windows):
        raise config.wrong("layer_types", f"{num_layers} of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def _eos_token_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = Fields.of(path) if path.exists() else Fields({}, str(path))
    return generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
