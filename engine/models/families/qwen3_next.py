"""Qwen3-Next: a hybrid model with experts."""

from engine.models.blocks.delta_net import ByKeyHead
from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, hybrid, moe
from engine.models.fields import Fields


def qwen3_next(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    norm = hybrid.norm(config)
    experts = moe.experts(config, shared=moe.shared_expert(config), normalise=True)
    nets = moe.nets(config, experts)
    layers = [
        LayerSpec(mixer, ffn, norm)
        for mixer, ffn in zip(hybrid.mixers(config, ByKeyHead()), nets, strict=True)
    ]
    decoder = common.decoder(config, eos_token_ids, layers, norm)
    return hybrid.with_drafts(decoder, config, experts)
