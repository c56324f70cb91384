"""Llama 2 and later, and the families that differ from it in a few numbers.

LLaVA 1.5 is a Llama with an image encoder. Layers of Mistral may have a sliding window. Mixtral
also has experts.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.models.blocks.experts import Experts
from engine.models.decoder import DecoderSpec
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import SeparateExperts
from kernels.experts.routing import Routing


def llama(config: Fields) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    mixer = common.attention(config, common.even_head_dim(config), bias=bias)
    ffn = common.dense(config, bias=config.flag("mlp_bias", False))
    return common.decoder(config, mixer, ffn, common.norm(config))


_LLAVA: Mapping[str, str | int] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def llava(config: Fields) -> DecoderSpec:
    text = config.nested("text_config")
    if text.text("model_type", "llama") != "llama":
        raise text.wrong("model_type", "llama")
    return common.beside_encoder(config, llama, common.LLAVA_NAMES, _LLAVA)


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
