"""Qwen3-MoE: Qwen3 with experts instead of most dense nets."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields


def qwen3_moe(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    windowed = config.flag("use_sliding_window", False) and not config.is_null("sliding_window")
    mixer = replace(
        common.attention(
            config, common.even_head_dim(config), qkv_bias=bias, output_bias=bias, qk_norm=norm
        ),
        window=config.integer("sliding_window", 4096) if windowed else None,
    )
    layers = [LayerSpec(mixer, ffn, norm) for ffn in moe.nets(config, moe.experts(config))]
    return common.decoder(config, eos_token_ids, layers, norm)
