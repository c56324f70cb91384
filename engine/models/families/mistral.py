"""Mistral: all layers may have a sliding window."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields


def mistral(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    # An explicit null disables the window. transformers fills an absent field with 4096.
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    mixer = replace(common.attention(config, common.even_head_dim(config)), window=window)
    norm = common.norm(config)
    layer = LayerSpec(mixer, common.dense(config), norm)
    layers = [layer] * config.integer("num_hidden_layers")
    return common.decoder(config, eos_token_ids, layers, norm)
