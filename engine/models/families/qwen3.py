"""Qwen3 and Qwen3-MoE: norms of queries and keys instead of Qwen2's biases.

Qwen3-VL has image tokens with axial rotation. Its first layers add image features to their outputs.
dots.llm1 has the attention of Qwen3, and the expert routing of DeepSeek-V3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.blocks.layer import FfnSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.families.qwen2 import has_windows, windows
from engine.models.fields import Fields
from engine.models.quantized.experts import StackedTensor
from engine.models.rope import interleaved


def qwen3(config: Fields) -> DecoderSpec:
    mixers = common.windowed(_attention(config, config.integer("head_dim", 128)), windows(config))
    return common.decoder(config, mixers, common.dense(config), common.norm(config))


def qwen3_moe(config: Fields) -> DecoderSpec:
    window = config.integer("sliding_window", 4096) if has_windows(config) else None
    mixer = replace(_attention(config, common.even_head_dim(config)), window=window)
    nets = moe.nets(config, moe.experts(config))
    return common.decoder(config, mixer, nets, common.norm(config))


def dots1(config: Fields) -> DecoderSpec:
    mixer = _attention(config, common.even_head_dim(config))
    windows = common.windows(
        config,
        lambda layer: layer >= config.count("max_window_layers", 62),
        enabled=not config.is_null("sliding_window"),
    )
    nets = moe.nets_after(config, common.dense(config), moe.deepseek_experts(config), 0)
    return common.decoder(config, common.windowed(mixer, windows), nets, common.norm(config))


_SECTIONS = (24, 20, 20)
_FEATURES = (8, 16, 24)  # layers of the image encoder


def qwen3_vl(config: Fields) -> DecoderSpec:
    return _qwen3_vl(config, common.dense)


def qwen3_vl_moe(config: Fields) -> DecoderSpec:
    def nets(text: Fields) -> Sequence[FfnSpec]:
        experts = replace(moe.experts(text, normalise=True), storage=StackedTensor())
        return moe.nets(text, experts)

    return _qwen3_vl(config, nets)


def _qwen3_vl(config: Fields, nets: Callable[[Fields], FfnSpec | Sequence[FfnSpec]]) -> DecoderSpec:
    vision = config.nested("vision_config")
    named = "deepstack_visual_indexes" in vision
    features = vision.counts("deepstack_visual_indexes") if named else _FEATURES

    def decoder(text: Fields) -> DecoderSpec:
        mixer = _attention(text, text.integer("head_dim", 128), rope_theta=5e5)
        mixer = replace(mixer, rope=interleaved(text, mixer.rope, _SECTIONS))
        return common.decoder(text, mixer, nets(text), common.norm(text))

    return replace(common.beside_encoder(config, decoder), feature_layers=len(features))


def _attention(config: Fields, head_dim: int, rope_theta: float = 1e4) -> Attention:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    return common.attention(config, head_dim, bias=bias, qk_norm=norm, rope_theta=rope_theta)
