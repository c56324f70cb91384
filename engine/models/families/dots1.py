"""dots.llm1: attention of Qwen3, and the expert routing of DeepSeek-V3."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields


def dots1(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    mixer = common.attention(
        config, common.even_head_dim(config), qkv_bias=bias, output_bias=bias, qk_norm=norm
    )
    sparse, dense = moe.deepseek_experts(config), common.dense(config)
    first = config.count("first_k_dense_replace", 0)
    layers = [
        LayerSpec(replace(mixer, window=window), sparse if layer >= first else dense, norm)
        for layer, window in enumerate(_windows(config))
    ]
    return common.decoder(config, eos_token_ids, layers, norm)


def _windows(config: Fields) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    if config.is_null("sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    if "layer_types" in config:
        return common.typed_windows(config, window)
    first = config.count("max_window_layers", 62)
    return tuple(window if layer >= first else None for layer in range(num_layers))
