"""Llama 2 and later, and LLaVA 1.5, which is a Llama with an image encoder."""

from collections.abc import Mapping

from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields


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
