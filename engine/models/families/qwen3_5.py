"""Qwen3.5, text only: a hybrid model with or without experts, standalone or as part of the
multimodal model. Images are not served."""

from dataclasses import replace

from engine.models.blocks.delta_net import ByKind
from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, hybrid, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import StackedTensor


def qwen3_5(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    norm, ffn = hybrid.norm(config), common.dense(config)
    layers = [LayerSpec(mixer, ffn, norm) for mixer in hybrid.mixers(config, ByKind())]
    return hybrid.with_drafts(common.decoder(config, eos_token_ids, layers, norm), config, ffn)


def qwen3_5_moe(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    norm = hybrid.norm(config)
    ffn = moe.experts(config, shared=moe.shared_expert(config), normalise=True)
    # The authors store stacked experts. Quantised checkpoints of third parties store them one by
    # one.
    ffn = replace(ffn, storage=StackedTensor())
    layers = [LayerSpec(mixer, ffn, norm) for mixer in hybrid.mixers(config, ByKind())]
    return hybrid.with_drafts(common.decoder(config, eos_token_ids, layers, norm), config, ffn)


def qwen3_5_with_images(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    return _of_texts(qwen3_5(config.nested("text_config"), eos_token_ids))


def qwen3_5_moe_with_images(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    return _of_texts(qwen3_5_moe(config.nested("text_config"), eos_token_ids))


def _of_texts(spec: DecoderSpec) -> DecoderSpec:
    unused = (*spec.unused, "model.visual.")
    return replace(spec, prefix="model.language_model.", unused=unused)
