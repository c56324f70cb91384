"""Llama 2 and later."""

from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields


def llama(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    bias, norm = config.flag("attention_bias", False), common.norm(config)
    head_dim = common.even_head_dim(config)
    mixer = common.attention(config, head_dim, qkv_bias=bias, output_bias=bias)
    ffn = common.dense(config, bias=config.flag("mlp_bias", False))
    layers = [LayerSpec(mixer, ffn, norm)] * config.integer("num_hidden_layers")
    return common.decoder(config, eos_token_ids, layers, norm)
