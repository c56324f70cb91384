"""Qwen2 and 2.5: biases of queries, keys and values, and sliding windows if they are enabled.

Qwen2-MoE has experts, and one shared expert for all tokens. Qwen2.5-VL has image tokens with axial
rotation. engine/models/vision/ computes image embeddings.
"""

from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.rope import in_sections


def qwen2(config: Fields) -> DecoderSpec:
    mixer, ffn, norm = _attention(config), common.dense(config), common.norm(config)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(config)]
    return common.decoder(config, layers, norm)


def windows(config: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, for all generations of Qwen."""
    if not config.flag("use_sliding_window", False) or config.is_null("sliding_window"):
        return (None,) * common.num_layers_of(config)
    first = config.count("max_window_layers", 28)
    return common.windows(config, 4096, lambda layer: layer >= first)


def qwen2_moe(config: Fields) -> DecoderSpec:
    norm = common.norm(config)
    mixer = replace(_attention(config), qkv_bias=config.flag("qkv_bias", True))
    nets = moe.nets(config, moe.experts(config, shared=moe.shared_expert(config)))
    layers = [
        LayerSpec(replace(mixer, window=window), ffn, norm)
        for window, ffn in zip(_moe_windows(config), nets, strict=True)
    ]
    return common.decoder(config, layers, norm)


def _moe_windows(config: Fields) -> tuple[int | None, ...]:
    """Return each layer's window. Unlike in Qwen2, every other one of the first layers has one."""
    if not config.flag("use_sliding_window", False):
        return (None,) * common.num_layers_of(config)
    first = config.count("max_window_layers", 28)
    return common.windows(config, 4096, lambda layer: layer % 2 == 0 and layer < first)


_SECTIONS = (16, 24, 24)


def qwen2_5_vl(config: Fields) -> DecoderSpec:
    """Return the decoder. Configurations of transformers 4 have the fields of the text model at the
    top level."""
    text = common.text_config(config) if "text_config" in config else config
    norm, mixer = common.norm(text, eps=1e-5), _attention(text, rope_theta=1e6)
    mixer = replace(mixer, rope=in_sections(text, mixer.rope, _SECTIONS))
    ffn = common.dense(text)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(text)]
    spec = common.quantised_as(config, common.decoder(text, layers, norm))
    tied = config.flag("tie_word_embeddings", spec.tied_embeddings)
    return replace(spec, tied_embeddings=tied, unused=("visual.",))


def _attention(config: Fields, rope_theta: float = 1e4) -> Attention:
    mixer = common.attention(config, common.even_head_dim(config), rope_theta=rope_theta)
    return replace(mixer, qkv_bias=True)
