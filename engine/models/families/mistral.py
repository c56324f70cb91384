"""Mistral, whose layers may have a sliding window, and Mixtral, which also has experts."""

from dataclasses import replace

from engine.models.blocks.experts import Experts
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import SeparateExperts
from kernels.experts.routing import Routing


def mistral(config: Fields) -> DecoderSpec:
    # An explicit null disables the window. The default of an absent field in transformers is 4096.
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    mixer = replace(common.attention(config, common.even_head_dim(config)), window=window)
    return common.decoder(config, mixer, common.dense(config), common.norm(config))


def mixtral(config: Fields) -> DecoderSpec:
    window = config.integer("sliding_window") if "sliding_window" in config else None
    mixer = common.attention(config, common.even_head_dim(config), rope_theta=1e6)
    count = config.integer("num_local_experts", 8)
    experts = Experts(
        count=count,
        intermediate_size=config.integer("intermediate_size"),
        gate=common.activation(config),
        routing=Routing(moe.per_token(config, count, 2), normalise=True),
        module="block_sparse_moe",
        storage=SeparateExperts("w1", "w3", "w2"),
    )
    norm = common.norm(config, eps=1e-5)
    return common.decoder(config, replace(mixer, window=window), experts, norm)
