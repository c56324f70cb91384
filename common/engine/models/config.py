"""config.json of a Hugging Face checkpoint -> ModelSpec, in the forms of transformers 4 and 5.

A default here is the default of that architecture's configuration class in transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.engine.models.fields import Fields
from common.engine.models.rope import extended_context, parse_rope
from common.engine.models.spec import ModelSpec
from common.errors import ConfigError
from kernels.act_and_mul import Activation

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
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


def _gemma2(config: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    if config.flag("use_bidirectional_attention", False):
        raise config.wrong("use_bidirectional_attention", "false")
    bias = config.flag("attention_bias", False)
    spec = _spec(
        config,
        eos_token_ids,
        architecture="gemma2",
        head_dim=config.integer("head_dim", 256),
        activation=_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=bias,
        output_bias=bias,
        windows=_gemma_windows(config),
    )
    return replace(
        spec,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=_soft_cap(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 30.0),
        post_norms=True,
        norms_from_one=True,
    )


_PARSERS: dict[str, Callable[[Fields, tuple[int, ...]], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
}


def _spec(
    config: Fields,
    eos_token_ids: tuple[int, ...],
    *,
    architecture: str,
    head_dim: int,
    activation: Activation | None = None,
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
        embedding_scale=1.0,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config, head_dim, context_length),
        windows=windows or (None,) * num_layers,
        attention_scale=head_dim**-0.5,
        soft_cap=None,
        logit_soft_cap=None,
        activation=activation or _activation(config, "hidden_act", "silu"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        post_norms=False,
        norms_from_one=False,
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
    return _typed_windows(config, window)


def _gemma_windows(config: Fields) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", 4096)
    if "layer_types" in config:
        return _typed_windows(config, window)
    layers = range(config.integer("num_hidden_layers"))
    return tuple(None if layer % 2 else window for layer in layers)


def _typed_windows(config: Fields, window: int) -> tuple[int | None, ...]:
    windows = {"full_attention": None, "sliding_attention": window}
    kinds, num_layers = config.texts("layer_types"), config.integer("num_hidden_layers")
    if len(kinds) != num_layers or not set(kinds) <= set(windows):
        raise config.wrong("layer_types", f"{num_layers} of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def _activation(config: Fields, name: str, default: str) -> Activation:
    activation = _ACTIVATIONS.get(config.text(name, default))
    if activation is None:
        raise config.wrong(name, "one of " + ", ".join(_ACTIVATIONS))
    return activation


def _soft_cap(config: Fields, name: str, default: float) -> float | None:
    """An explicit null switches the cap off."""
    if config.is_null(name):
        return None
    cap = config.number(name, default)
    if cap <= 0:
        raise config.wrong(name, "a positive number or null")
    return cap


def _eos_token_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = Fields.of(path) if path.exists() else Fields({}, str(path))
    return generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
