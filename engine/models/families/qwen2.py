"""Qwen2 and 2.5: biases of queries, keys and values, and sliding windows if they are enabled.

Qwen2-MoE has experts, and one shared expert for all tokens. Qwen2.5-VL has image tokens with axial
rotation. engine/models/vision/ computes image embeddings.
"""

from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.rope import in_sections


def qwen2(config: Fields) -> DecoderSpec:
    mixers = common.windowed(_attention(config), windows(config))
    return common.decoder(config, mixers, common.dense(config), common.norm(config))


def windows(config: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, for all generations of Qwen."""
    return common.windows(
        config,
        lambda layer: layer >= config.count("max_window_layers", 28),
        enabled=has_windows(config),
    )


def has_windows(config: Fields) -> bool:
    return config.flag("use_sliding_window", False) and not config.is_null("sliding_window")


def qwen2_moe(config: Fields) -> DecoderSpec:
    """Return the decoder. Unlike in Qwen2, every other one of the first layers has a window."""
    mixer = replace(_attention(config), qkv_bias=config.flag("qkv_bias", True))
    windows = common.windows(
        config,
        lambda layer: layer % 2 == 0 and layer < config.count("max_window_layers", 28),
        enabled=config.flag("use_sliding_window", False),
    )
    nets = moe.nets(config, moe.experts(config, shared=True))
    return common.decoder(config, common.windowed(mixer, windows), nets, common.norm(config))


_SECTIONS = (16, 24, 24)
_NAMES = common.NamesBesideEncoder("model.", ("visual.",))


def qwen2_5_vl(config: Fields) -> DecoderSpec:
    """Return the decoder. Configurations of transformers 4 have the fields of the text model at the
    top level."""
    text = common.text_config(config) if "text_config" in config else config
    mixer = _attention(text, rope_theta=1e6)
    mixer = replace(mixer, rope=in_sections(text, mixer.rope, _SECTIONS))
    mixers, norm = common.windowed(mixer, windows(text)), common.norm(text, eps=1e-5)
    decoder = common.decoder(text, mixers, common.dense(text), norm)
    return common.with_encoder(config, decoder, _NAMES)


def _attention(config: Fields, rope_theta: float = 1e4) -> Attention:
    mixer = common.attention(config, common.even_head_dim(config), rope_theta=rope_theta)
    return replace(mixer, qkv_bias=True)
