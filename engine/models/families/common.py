"""Configuration fields that most families share, and the heads of checkpoints.

A checkpoint has a head for tokens, a head for classes, or no head. The configuration names the
class that saved it. Embedding checkpoints may have only the decoder, in contradiction to that
class. Their tensor names then have no prefix.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import ConfigError
from engine.models.blocks.attention import Attention
from engine.models.blocks.experts import DenseMlp
from engine.models.blocks.layer import FfnSpec, LayerSpec, MixerSpec, Norm
from engine.models.decoder import DecoderSpec
from engine.models.fields import Fields
from engine.models.quantized import scheme_of
from engine.models.rope import extended_context, parse_rope
from engine.models.spec import ModelSpec
from kernels.layers.act_and_mul import Activation

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


def decoder(
    config: Fields,
    mixers: MixerSpec | Sequence[MixerSpec],
    nets: FfnSpec | Sequence[FfnSpec],
    norm: Norm,
    *,
    post_norms: bool = False,
    tied_embeddings: bool = False,
    embedding_scale: float = 1.0,
    logit_soft_cap: float | None = None,
) -> DecoderSpec:
    """Return the decoder of a configuration, still without its end-of-sequence ids.

    Args:
        mixers, nets: of each layer, or one for all layers.
        norm: every norm of the decoder outside the mixers.
        post_norms: see LayerSpec.
        tied_embeddings: default if the configuration has no such field.
    """
    num_layers = num_layers_of(config)
    mixers = mixers if isinstance(mixers, Sequence) else [mixers] * num_layers
    nets = nets if isinstance(nets, Sequence) else [nets] * num_layers
    pairs = zip(mixers, nets, strict=True)
    layers = tuple(LayerSpec(*pair, norm, post_norms) for pair in pairs)
    hidden_size = config.integer("hidden_size")
    context_length = config.integer("max_position_embeddings")
    name = "dtype" if "dtype" in config else "torch_dtype"
    dtype = _DTYPES.get(config.text(name, "float32"))
    if dtype is None:
        raise config.wrong(name, "one of " + ", ".join(_DTYPES))
    stored = scheme_of(config)
    return DecoderSpec(
        model=ModelSpec(
            architecture=config.text("model_type"),
            vocabulary_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            dtype=dtype,
            context_length=extended_context(config, context_length),
            eos_token_ids=(),
            layers=tuple(layer.mixer.keeps for layer in layers),
            products_per_token=sum(layer.products(hidden_size) for layer in layers),
            stored=stored.name,
            format=stored.format,
        ),
        layers=layers,
        norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", tied_embeddings),
        embedding_scale=embedding_scale,
        logit_soft_cap=logit_soft_cap,
        stored=stored,
    )


@dataclass(frozen=True, slots=True)
class NamesBesideEncoder:
    """The tensor names of a decoder in a checkpoint with an image encoder, see DecoderSpec."""

    prefix: str
    unused: tuple[str, ...]
    head: str = "lm_head"


QWEN_NAMES = NamesBesideEncoder("model.language_model.", ("model.visual.",))
LLAVA_NAMES = NamesBesideEncoder(
    "language_model.model.",
    ("vision_tower.", "multi_modal_projector."),
    head="language_model.lm_head",
)


def beside_encoder(
    config: Fields,
    family: Callable[[Fields], DecoderSpec],
    names: NamesBesideEncoder = QWEN_NAMES,
    defaults: Mapping[str, str | int] | None = None,
) -> DecoderSpec:
    """Return the decoder of a checkpoint with an image encoder. The field `text_config` describes
    the decoder.

    Args:
        family: reads the decoder.
        defaults: defaults of `text_config`.
    """
    return with_encoder(config, family(text_config(config, defaults)), names)


def with_encoder(config: Fields, spec: DecoderSpec, names: NamesBesideEncoder) -> DecoderSpec:
    """Return the decoder `spec` with the fields of the whole configuration that apply to it. The
    decoder's own quantisation applies if the whole has none."""
    if "quantization_config" in config:
        stored = scheme_of(config)
        model = replace(spec.model, stored=stored.name, format=stored.format)
        spec = replace(spec, model=model, stored=stored)
    return replace(
        spec,
        prefix=names.prefix,
        head=names.head,
        unused=(*spec.unused, *names.unused),
        tied_embeddings=config.flag("tie_word_embeddings", spec.tied_embeddings),
    )


def text_config(config: Fields, defaults: Mapping[str, str | int] | None = None) -> Fields:
    """Return the decoder's part of a configuration. The dtype of the whole configuration is its
    default.

    Args:
        defaults: defaults of other fields.
    """
    text, whole = config.nested("text_config"), {}
    for name in ("dtype", "torch_dtype"):
        if name in config and "dtype" not in text and "torch_dtype" not in text:
            whole[name] = config.text(name)
    return config.nested("text_config", {**(defaults or {}), **whole})


def attention(
    config: Fields,
    head_dim: int,
    *,
    scale: float | None = None,
    bias: bool = False,
    qk_norm: Norm | None = None,
    rope_theta: float = 1e4,
    rotated: float | None = None,
) -> Attention:
    """Return the attention of a layer without a window.

    Args:
        scale: None: derived from the head size, as usual.
        rope_theta: default if the configuration has no such field.
        rotated: see `parse_rope`.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    if head_dim % 2:
        architecture = config.text("model_type")
        raise ConfigError(f"{architecture}: an odd head_dim ({head_dim}) is not supported")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=parse_rope(
            config,
            head_dim,
            config.integer("max_position_embeddings"),
            theta=rope_theta,
            rotated=rotated,
        ),
        scale=head_dim**-0.5 if scale is None else scale,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
    )


def dense(config: Fields, *, bias: bool = False) -> DenseMlp:
    return DenseMlp(config.integer("intermediate_size"), activation(config), bias)


def norm(config: Fields, *, from_one: bool = False, eps: float = 1e-6) -> Norm:
    """Return the norm of a configuration.

    Args:
        eps: default if the configuration has no such field.
    """
    return Norm(config.number("rms_norm_eps", eps), from_one)


def even_head_dim(config: Fields) -> int:
    """Return head_dim. Its default is the hidden size divided by the number of heads."""
    even = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", even)


def activation(config: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    found = _ACTIVATIONS.get(config.text(name, default))
    if found is None:
        raise config.wrong(name, "one of " + ", ".join(_ACTIVATIONS))
    return found


def soft_cap(config: Fields, name: str, default: float) -> float | None:
    """Return the soft cap of a field, or `default` if it is absent. An explicit null disables the
    cap."""
    if config.is_null(name):
        return None
    cap = config.number(name, default)
    if cap <= 0:
        raise config.wrong(name, "a positive number or null")
    return cap


def windows(
    config: Fields, slides: Callable[[int], bool], *, default: int = 4096, enabled: bool = True
) -> tuple[int | None, ...]:
    """Return each layer's window.

    Args:
        slides: returns whether a layer has a window if the configuration has no `layer_types`.
        default: window if the configuration has no such field.
        enabled: False: no layer has a window.
    """
    num_layers = num_layers_of(config)
    if not enabled:
        return (None,) * num_layers
    window = config.integer("sliding_window", default)
    if "layer_types" not in config:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    kinds = layer_types(config, ("full_attention", "sliding_attention"))
    return tuple(None if kind == "full_attention" else window for kind in kinds)


def windowed(mixer: Attention, windows: Sequence[int | None]) -> list[Attention]:
    """Return the attention of each layer. They differ only in their windows."""
    return [replace(mixer, window=window) for window in windows]


def layer_types(config: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """Return the kind of each layer, which must be one of `kinds`."""
    found, num_layers = config.texts("layer_types"), num_layers_of(config)
    if len(found) != num_layers or not set(found) <= set(kinds):
        raise config.wrong("layer_types", f"{num_layers} of {', '.join(kinds)}")
    return found


def num_layers_of(config: Fields) -> int:
    return config.integer("num_hidden_layers")


CLASSIFIER = "ForSequenceClassification"
_USUAL_LABELS = 2  # default that transformers omits from configurations


def with_heads(decoder: DecoderSpec, config: Fields) -> DecoderSpec:
    """Return the decoder with the heads declared by its configuration."""
    saved_by = config.texts("architectures") if "architectures" in config else ()
    if any(name.endswith(CLASSIFIER) for name in saved_by):
        labels = config.nested("id2label").size or config.integer("num_labels", _USUAL_LABELS)
        return replace(decoder, model=replace(decoder.model, generates=False, num_labels=labels))
    if any(name.endswith("Model") for name in saved_by):
        tied = decoder.tied_embeddings
        return replace(decoder, model=replace(decoder.model, generates=tied))
    return decoder


def with_names(decoder: DecoderSpec, names: Collection[str]) -> DecoderSpec:
    """Return the decoder adapted to the names of the stored tensors: without a prefix if the
    checkpoint has only the decoder."""
    if "embed_tokens.weight" not in names or "model.embed_tokens.weight" in names:
        return decoder
    generates = decoder.model.generates and (decoder.tied_embeddings or "lm_head.weight" in names)
    return replace(decoder, prefix="", model=replace(decoder.model, generates=generates))
