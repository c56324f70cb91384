"""Qwen2-MoE: Qwen2 with experts, and one shared expert for all tokens."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields


def qwen2_moe(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    norm = common.norm(config)
    mixer = common.attention(
        config, common.even_head_dim(config), qkv_bias=config.flag("qkv_bias", True)
    )
    nets = moe.nets(config, moe.experts(config, shared=moe.shared_expert(config)))
    layers = [
        LayerSpec(replace(mixer, window=window), ffn, norm)
        for window, ffn in zip(_windows(config), nets, strict=True)
    ]
    return common.decoder(config, eos_token_ids, layers, norm)


def _windows(config: Fields) -> tuple[int | None, ...]:
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
