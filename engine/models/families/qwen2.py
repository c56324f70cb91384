"""Qwen2 and 2.5: biases of queries, keys and values, and sliding windows if they are enabled.

Qwen2-MoE has experts, and one shared expert for all tokens. Qwen2.5-VL has image tokens with axial
rotation. engine/models/vision/ computes image embeddings.
"""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.rope import in_sections


def qwen2(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    mixer = common.attention(config, common.even_head_dim(config), qkv_bias=True)
    ffn, norm = common.dense(config), common.norm(config)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(config)]
    return common.decoder(config, eos_token_ids, layers, norm)


def windows(config: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, for all generations of Qwen."""
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False) or config.is_null("sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    if "layer_types" not in config:
        first = config.count("max_window_layers", 28)
        return tuple(None if layer < first else window for layer in range(num_layers))
    return common.typed_windows(config, window)


def qwen2_moe(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    norm = common.norm(config)
    mixer = common.attention(
        config, common.even_head_dim(config), qkv_bias=config.flag("qkv_bias", True)
    )
    nets = moe.nets(config, moe.experts(config, shared=moe.shared_expert(config)))
    layers = [
        LayerSpec(replace(mixer, window=window), ffn, norm)
        for window, ffn in zip(_moe_windows(config), nets, strict=True)
    ]
    return common.decoder(config, eos_token_ids, layers, norm)


def _moe_windows(config: Fields) -> tuple[int | None, ...]:
    """Return each layer's window. Unlike in Qwen2, every other one of the first layers has one."""
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    if "layer_types" in config:
        return common.typed_windows(config, window)
    first = config.count("max_window_layers", 28)
    return tuple(
        window if layer % 2 == 0 and layer < first else None for layer in range(num_layers)
    )


_SECTIONS = (16, 24, 24)


def qwen2_5_vl(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    """Return the decoder. Configurations of transformers 4 have the fields of the text model at the
    top level."""
    text = common.text_config(config) if "text_config" in config else config
    norm = common.norm(text, eps=1e-5)
    mixer = common.attention(text, common.even_head_dim(text), qkv_bias=True, rope_theta=1e6)
    mixer = replace(mixer, rope=in_sections(text, mixer.rope, _SECTIONS))
    layers = [
        LayerSpec(replace(mixer, window=window), common.dense(text), norm)
        for window in windows(text)
    ]
    spec = common.decoder(text, eos_token_ids or text.token_ids("eos_token_id"), layers, norm)
    tied = config.flag("tie_word_embeddings", spec.tied_embeddings)
    spec = common.quantised_as(config, spec)
    return replace(spec, tied_embeddings=tied, unused=("visual.",))
