"""Gemma 2 and 3: four norms per layer, and sliding windows in most layers.

Gemma 2 has soft caps, and a window in every other layer. Gemma 3 has norms of queries and keys
instead. Five layers with a window alternate with one layer without. The two kinds have different
RoPE. Image tokens attend to all tokens of their image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.blocks.experts import DenseMlp
from engine.models.blocks.layer import Norm
from engine.models.blocks.rotation import Rope
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields
from engine.models.rope import rope_of


def gemma2(config: Fields) -> DecoderSpec:
    soft_cap = common.soft_cap(config, "attn_logit_softcapping", 50.0)
    mixer = replace(_attention(config, qk_norm=None), soft_cap=soft_cap)
    mixers = common.windowed(mixer, common.windows(config, lambda layer: layer % 2 == 0))
    return _decoder(config, mixers, common.soft_cap(config, "final_logit_softcapping", 30.0))


def gemma3(config: Fields) -> DecoderSpec:
    soft_cap = _soft_cap(config, "attn_logit_softcapping")
    mixer = replace(_attention(config, qk_norm=_norm(config)), soft_cap=soft_cap)
    full, sliding = _ropes(config, mixer.head_dim)
    name = "sliding_window_pattern"
    every = config.integer(name if name in config else f"_{name}", 6)
    windows = common.windows(config, lambda layer: (layer + 1) % every > 0)
    mixers = [
        replace(mixer, window=window, rope=full if window is None else sliding)
        for window in windows
    ]
    return _decoder(config, mixers, _soft_cap(config, "final_logit_softcapping"))


def _norm(config: Fields) -> Norm:
    return common.norm(config, from_one=True)


def _attention(config: Fields, qk_norm: Norm | None) -> Attention:
    if config.flag("use_bidirectional_attention", False):
        raise config.wrong("use_bidirectional_attention", "false")
    return common.attention(
        config,
        config.integer("head_dim", 256),
        scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        bias=config.flag("attention_bias", False),
        qk_norm=qk_norm,
    )


def _decoder(
    config: Fields, mixers: Sequence[Attention], logit_soft_cap: float | None
) -> DecoderSpec:
    activation = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    ffn, norm = DenseMlp(config.integer("intermediate_size"), activation), _norm(config)
    return common.decoder(
        config,
        mixers,
        ffn,
        norm,
        post_norms=True,
        tied_embeddings=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_soft_cap=logit_soft_cap,
    )


_FULL_THETA, _SLIDING_THETA = 1e6, 1e4


def _soft_cap(config: Fields, name: str) -> float | None:
    """Return the soft cap of a field. An absent field means that there is no cap."""
    return common.soft_cap(config, name, 0.0) if name in config else None


def _ropes(config: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Return the RoPE of layers without a window and of layers with one."""
    context_length = config.integer("max_position_embeddings")
    if "rope_parameters" in config:
        ropes = config.nested("rope_parameters")
        full, sliding = ropes.nested("full_attention"), ropes.nested("sliding_attention")
    else:
        full, sliding = config.nested("rope_scaling"), Fields({}, "rope_scaling")
    full_theta = config.number("rope_theta", _FULL_THETA)
    sliding_theta = config.number("rope_local_base_freq", _SLIDING_THETA)
    return (
        rope_of(full, head_dim, context_length, theta=full_theta),
        rope_of(sliding, head_dim, context_length, theta=sliding_theta),
    )


_GEMMA3: Mapping[str, str | int] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def gemma3_with_images(config: Fields) -> DecoderSpec:
    spec = common.beside_encoder(config, gemma3, common.LLAVA_NAMES, _GEMMA3)
    num_tokens = config.integer("mm_tokens_per_image", 256)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        if layer.mixer.window is not None and layer.mixer.window < num_tokens:
            raise config.wrong("mm_tokens_per_image", f"at most the window {layer.mixer.window}")
        layers.append(replace(layer, mixer=replace(layer.mixer, whole_images=True)))
    return replace(spec, layers=tuple(layers))
