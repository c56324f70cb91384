"""Qwen3-Next and Qwen3.5, with or without experts.

Three layers with a gated delta net alternate with one attention layer, whose output is gated and
whose heads are partially rotated. Qwen3.5 is standalone or a part of the multimodal model, whose
image tokens have axial rotation.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.models.blocks.attention import Attention
from engine.models.blocks.delta_net import ByKeyHead, ByKind, DeltaNet, Projection
from engine.models.blocks.layer import FfnSpec, Norm
from engine.models.decoder import DecoderSpec
from engine.models.drafting import BodySpec, DraftSpec, InnerNorms
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.quantized.experts import StackedTensor
from engine.models.rope import interleaved

_KINDS = ("linear_attention", "full_attention")
_DRAFTS = "mtp."
_SECTIONS = (11, 11, 10)
_INNER_NORMS = InnerNorms("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", recurring=True)


def _with_drafts(
    spec: DecoderSpec, config: Fields, attention: Attention, ffn: FfnSpec
) -> DecoderSpec:
    """Return the spec with the checkpoint's MTP layer as the offered draft layer. It is one more
    attention layer, and shares the model's embedding and head.

    Args:
        attention, ffn: parts of that layer.
    """
    offered = DraftSpec(
        body=BodySpec(attention, ffn, spec.norm, prefix="layers.0."),
        prefix=_DRAFTS,
        join="fc",
        join_bias=False,
        inner_norms=_INNER_NORMS,
        input_norm=True,
    )
    own_embedding = config.flag("mtp_use_dedicated_embeddings", False)
    unused = (*spec.unused, _DRAFTS)
    return replace(spec, unused=unused, offered=None if own_embedding else offered)


def _norm(config: Fields) -> Norm:
    """Return the norm of everything outside the delta net."""
    return common.norm(config, from_one=True)


def _mixers(
    config: Fields, attention: Attention, projection: Projection
) -> Sequence[Attention | DeltaNet]:
    delta_net = _delta_net(config, projection)
    return [attention if kind == "full_attention" else delta_net for kind in _kinds(config)]


def _attention(config: Fields) -> Attention:
    mixer = common.attention(
        config,
        config.integer("head_dim", 256),
        bias=config.flag("attention_bias", False),
        qk_norm=_norm(config),
        rotated=0.25,
    )
    return replace(mixer, output_gate=True)


def _delta_net(config: Fields, projection: Projection) -> DeltaNet:
    heads = config.integer("linear_num_key_heads", 16)
    value_heads = config.integer("linear_num_value_heads", 32)
    if value_heads % heads:
        raise config.wrong("linear_num_value_heads", f"a multiple of {heads} key heads")
    width = config.integer("linear_conv_kernel_dim", 4)
    if width < 2:
        raise config.wrong("linear_conv_kernel_dim", "at least 2")
    if common.activation(config) != "silu":
        raise config.wrong("hidden_act", "silu")
    return DeltaNet(
        heads=heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        width=width,
        norm=common.norm(config),
        projection=projection,
    )


def _kinds(config: Fields) -> Sequence[str]:
    if "layer_types" in config:
        return common.layer_types(config, _KINDS)
    every, layers = config.integer("full_attention_interval", 4), common.num_layers_of(config)
    return [_KINDS[(layer + 1) % every == 0] for layer in range(layers)]


def qwen3_next(config: Fields) -> DecoderSpec:
    attention = _attention(config)
    experts = moe.experts(config, shared=True, normalise=True)
    mixers, nets = _mixers(config, attention, ByKeyHead()), moe.nets(config, experts)
    decoder = common.decoder(config, mixers, nets, _norm(config))
    return _with_drafts(decoder, config, attention, experts)


def qwen3_5(config: Fields) -> DecoderSpec:
    return _qwen3_5(config, common.dense(config))


def qwen3_5_moe(config: Fields) -> DecoderSpec:
    ffn = moe.experts(config, shared=True, normalise=True)
    # The authors store stacked experts. Quantised checkpoints of third parties store single ones.
    return _qwen3_5(config, replace(ffn, storage=StackedTensor()))


def _qwen3_5(config: Fields, ffn: FfnSpec) -> DecoderSpec:
    mixer = _attention(config)
    attention = replace(mixer, rope=interleaved(config, mixer.rope, _SECTIONS))
    decoder = common.decoder(config, _mixers(config, attention, ByKind()), ffn, _norm(config))
    return _with_drafts(decoder, config, attention, ffn)
