"""Qwen2 and 2.5: biases of queries, keys and values, and windows if they are enabled."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields


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
