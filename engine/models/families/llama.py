"""Llama 2 and later, and LLaVA 1.5, which is a Llama with an image encoder."""

from dataclasses import replace

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


_LLAVA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def llava(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    text = config.nested("text_config")
    if text.text("model_type", "llama") != "llama":
        raise text.wrong("model_type", "llama")
    spec = common.beside_encoder(config, eos_token_ids, llama, {"model_type": "llama", **_LLAVA})
    return replace(
        spec,
        prefix="language_model.model.",
        head="language_model.lm_head",
        unused=("vision_tower.", "multi_modal_projector."),
    )
