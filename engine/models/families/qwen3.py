"""Qwen3 and Qwen3-MoE: norms of queries and keys instead of Qwen2's biases.

Qwen3-VL has image tokens with axial rotation. Its first layers add image features to their outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.blocks.protocol import FfnSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.families.qwen2 import windows
from engine.models.fields import Fields
from engine.models.quantized.experts import StackedTensor
from engine.models.rope import interleaved


def qwen3(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    mixer = common.attention(
        config, config.integer("head_dim", 128), qkv_bias=bias, output_bias=bias, qk_norm=norm
    )
    ffn = common.dense(config)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(config)]
    return common.decoder(config, eos_token_ids, layers, norm)


_SECTIONS = (24, 20, 20)
_FEATURES = (8, 16, 24)  # layers of the image encoder


def qwen3_vl(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    def nets(text: Fields) -> Sequence[FfnSpec]:
        return [common.dense(text)] * text.integer("num_hidden_layers")

    return _qwen3_vl(config, eos_token_ids, nets)


def qwen3_vl_moe(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    def nets(text: Fields) -> Sequence[FfnSpec]:
        experts = replace(moe.experts(text, normalise=True), storage=StackedTensor())
        return moe.nets(text, experts)

    return _qwen3_vl(config, eos_token_ids, nets)


def _qwen3_vl(
    config: Fields, eos_token_ids: tuple[int, ...], nets: Callable[[Fields], Sequence[FfnSpec]]
) -> DecoderSpec:
    vision = config.nested("vision_config")
    named = "deepstack_visual_indexes" in vision
    features = vision.counts("deepstack_visual_indexes") if named else _FEATURES

    def text(own: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
        return _qwen3_vl_text(own, eos_token_ids, nets(own))

    spec = common.beside_encoder(config, eos_token_ids, text)
    return replace(spec, feature_layers=len(features))


def _qwen3_vl_text(
    config: Fields, eos_token_ids: tuple[int, ...], nets: Sequence[FfnSpec]
) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    mixer = common.attention(
        config,
        config.integer("head_dim", 128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        rope_theta=5e5,
    )
    mixer = replace(mixer, rope=interleaved(config, mixer.rope, _SECTIONS))
    layers = [LayerSpec(mixer, ffn, norm) for ffn in nets]
    return common.decoder(config, eos_token_ids, layers, norm)


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
