"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and clamped
gates."""

from dataclasses import replace

from engine.models.blocks.experts import Experts
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import InterleavedExperts
from kernels.experts.grouped_mlp import LIMIT, SLOPE
from kernels.experts.routing import Routing


def gpt_oss(config: Fields) -> DecoderSpec:
    for name, supported in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)):
        if config.number(name, supported) != supported:
            raise config.wrong(name, str(supported))
    bias, norm = config.flag("attention_bias", True), common.norm(config, eps=1e-5)
    mixer = common.attention(config, config.integer("head_dim", 64), bias=bias, rope_theta=150000.0)
    count = config.integer("num_local_experts", 128)
    experts = Experts(
        count=count,
        intermediate_size=config.integer("intermediate_size"),
        gate="clamped",
        routing=Routing(moe.per_token(config, count, 4), normalise=True),
        router="router",
        router_bias=True,
        storage=InterleavedExperts(),
    )
    windows = common.windows(config, lambda layer: layer % 2 == 0, default=128)
    mixers = common.windowed(replace(mixer, sinks=True), windows)
    return common.decoder(config, mixers, experts, norm)
