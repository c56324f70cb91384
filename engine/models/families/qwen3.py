"""Qwen3: norms of queries and keys in place of Qwen2's biases."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.families.qwen2 import windows
from engine.models.fields import Fields


def qwen3(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    mixer = common.attention(
        config, config.integer("head_dim", 128), qkv_bias=bias, output_bias=bias, qk_norm=norm
    )
    ffn = common.dense(config)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(config)]
    return common.decoder(config, eos_token_ids, layers, norm)
