"""Qwen3 and Qwen3-MoE: norms of queries and keys instead of Qwen2's biases.

Qwen3-VL has image tokens with axial rotation. Its first layers add image features to their outputs.
dots.llm1 has the attention of Qwen3, and the expert routing of DeepSeek-V3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.blocks.layer import FfnSpec, LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.families.qwen2 import windows
from engine.models.fields import Fields
from engine.models.quantized.experts import StackedTensor
from engine.models.rope import interleaved


def qwen3(config: Fields) -> DecoderSpec:
    mixer = _attention(config, config.integer("head_dim", 128))
    ffn, norm = common.dense(config), common.norm(config)
    layers = [LayerSpec(replace(mixer, window=window), ffn, norm) for window in windows(config)]
    return common.decoder(config, layers, norm)


def qwen3_moe(config: Fields) -> DecoderSpec:
    windowed = config.flag("use_sliding_window", False) and not config.is_null("sliding_window")
    window = config.integer("sliding_window", 4096) if windowed else None
    mixer = replace(_attention(config, common.even_head_dim(config)), window=window)
    norm = common.norm(config)
    layers = [LayerSpec(mixer, ffn, norm) for ffn in moe.nets(config, moe.experts(config))]
    return common.decoder(config, layers, norm)


def dots1(config: Fields) -> DecoderSpec:
    mixer, norm = _attention(config, common.even_head_dim(config)), common.norm(config)
    sparse, dense = moe.deepseek_experts(config), common.dense(config)
    first = config.count("first_k_dense_replace", 0)
    layers = [
        LayerSpec(replace(mixer, window=window), sparse if layer >= first else dense, norm)
        for layer, window in enumerate(_dots1_windows(config))
    ]
    return common.decoder(config, layers, norm)


def _dots1_windows(config: Fields) -> tuple[int | None, ...]:
    if config.is_null("sliding_window"):
        return (None,) * common.num_layers_of(config)
    first = config.count("max_window_layers", 62)
    return common.windows(config, 4096, lambda layer: layer >= first)


_SECTIONS = (24, 20, 20)
_FEATURES = (8, 16, 24)  # layers of the image encoder


def qwen3_vl(config: Fields) -> DecoderSpec:
    return _qwen3_vl(config, lambda text: [common.dense(text)] * common.num_layers_of(text))


def qwen3_vl_moe(config: Fields) -> DecoderSpec:
    def nets(text: Fields) -> Sequence[FfnSpec]:
        experts = replace(moe.experts(text, normalise=True), storage=StackedTensor())
        return moe.nets(text, experts)

    return _qwen3_vl(config, nets)


def _qwen3_vl(config: Fields, nets: Callable[[Fields], Sequence[FfnSpec]]) -> DecoderSpec:
    vision = config.nested("vision_config")
    named = "deepstack_visual_indexes" in vision
    features = vision.counts("deepstack_visual_indexes") if named else _FEATURES

    def decoder(text: Fields) -> DecoderSpec:
        mixer = _attention(text, text.integer("head_dim", 128), rope_theta=5e5)
        mixer = replace(mixer, rope=interleaved(text, mixer.rope, _SECTIONS))
        norm = common.norm(text)
        return common.decoder(text, [LayerSpec(mixer, ffn, norm) for ffn in nets(text)], norm)

    return replace(common.beside_encoder(config, decoder), feature_layers=len(features))


def _attention(config: Fields, head_dim: int, rope_theta: float = 1e4) -> Attention:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    return common.attention(config, head_dim, bias=bias, qk_norm=norm, rope_theta=rope_theta)
