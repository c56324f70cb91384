"""Gemma 2: soft caps, four norms per layer, and a window in every other layer."""

from dataclasses import replace

from engine.models.blocks.dense import DenseMlp
from engine.models.blocks.layer import LayerSpec
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.fields import Fields


def gemma2(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    if config.flag("use_bidirectional_attention", False):
        raise config.wrong("use_bidirectional_attention", "false")
    bias, norm = config.flag("attention_bias", False), common.norm(config, from_one=True)
    mixer = common.attention(
        config,
        config.integer("head_dim", 256),
        scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=common.soft_cap(config, "attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    ffn = DenseMlp(config.integer("intermediate_size"), activation)
    layers = [
        LayerSpec(replace(mixer, window=window), ffn, norm, post_norms=True)
        for window in _windows(config)
    ]
    return common.decoder(
        config,
        eos_token_ids,
        layers,
        norm,
        tied_embeddings=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_soft_cap=common.soft_cap(config, "final_logit_softcapping", 30.0),
    )


def _windows(config: Fields) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", 4096)
    if "layer_types" in config:
        return common.typed_windows(config, window)
    layers = range(config.integer("num_hidden_layers"))
    return tuple(None if layer % 2 else window for layer in layers)
