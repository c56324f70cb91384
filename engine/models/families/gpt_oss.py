"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and clamped
gates."""

from dataclasses import replace

from engine.models.blocks.experts import Experts
from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import InterleavedExperts
from kernels.experts.grouped_mlp import LIMIT, SLOPE
from kernels.experts.routing import Routing


def gpt_oss(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    for name, supported in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)):
        if config.number(name, supported) != supported:
            raise config.wrong(name, str(supported))
    bias, norm = config.flag("attention_bias", True), common.norm(config, eps=1e-5)
    mixer = common.attention(
        config, config.integer("head_dim", 64), qkv_bias=bias, output_bias=bias, rope_theta=150000.0
    )
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
    layers = [
        LayerSpec(replace(mixer, window=window, sinks=True), experts, norm)
        for window in _windows(config)
    ]
    return common.decoder(config, eos_token_ids, layers, norm)


def _windows(config: Fields) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", 128)
    if "layer_types" in config:
        return common.typed_windows(config, window)
    layers = range(config.integer("num_hidden_layers"))
    return tuple(None if layer % 2 else window for layer in layers)
