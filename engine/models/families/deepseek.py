"""DeepSeek-V2 and V3 (including R1): latent attention (MLA), and experts after the first layers."""

from dataclasses import replace

from engine.models.blocks.experts import Experts
from engine.models.blocks.latent import LatentAttention
from engine.models.blocks.layer import Norm
from engine.models.decoder import DecoderSpec
from engine.models.drafting import BodySpec, DraftSpec, InnerNorms
from engine.models.families import common, moe
from engine.models.fields import Fields
from engine.models.rope import parse_rope, score_scale

_ROTATED = "qk_rope_head_dim"
_LATENT_NORM = Norm(1e-6)  # fixed, independent of the configuration's eps
_INNER_NORMS = InnerNorms("enorm", "hnorm", "shared_head.norm", recurring=False)


def deepseek_v2(config: Fields) -> DecoderSpec:
    experts = moe.deepseek_v2_experts(config)
    return _decoder(config, experts, interleaved=True, first_sparse=0)


def deepseek_v3(config: Fields) -> DecoderSpec:
    interleaved = config.flag("rope_interleave", True)
    experts = moe.deepseek_experts(config, groups=8, chosen=4, shared=1, scale=2.5, normalise=True)
    spec = _decoder(config, experts, interleaved=interleaved, first_sparse=3)
    # Checkpoints may have additional layers that predict further tokens (MTP).
    first, more = len(spec.layers), config.count("num_nextn_predict_layers", 0)
    names = (f"model.layers.{layer}." for layer in range(first, first + more))
    offered = _first_behind(spec, experts, _attention(config, interleaved)) if more else None
    return replace(spec, unused=(*spec.unused, *names), offered=offered)


def _first_behind(spec: DecoderSpec, experts: Experts, mixer: LatentAttention) -> DraftSpec:
    """Return the first MTP layer. It shares the model's embedding and head, although the checkpoint
    has copies."""
    return DraftSpec(
        body=BodySpec(mixer, experts, spec.norm, prefix=""),
        prefix=f"model.layers.{len(spec.layers)}.",
        join="eh_proj",
        join_bias=False,
        inner_norms=_INNER_NORMS,
        input_norm=True,
    )


def _decoder(
    config: Fields, experts: Experts, *, interleaved: bool, first_sparse: int
) -> DecoderSpec:
    """Return the decoder of a configuration. `first_sparse`: see `moe.nets_after`."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.wrong("moe_layer_freq", "1")
    dense = common.dense(config, bias=config.flag("mlp_bias", False))
    nets = moe.nets_after(config, dense, experts, first_sparse)
    return common.decoder(config, _attention(config, interleaved), nets, common.norm(config))


def _attention(config: Fields, interleaved: bool) -> LatentAttention:
    key_dim, rotated = config.integer("qk_nope_head_dim", 128), config.integer(_ROTATED, 64)
    if rotated % 2:
        raise config.wrong(_ROTATED, "an even number")
    # transformers writes null if queries have no latents.
    query_rank = config.integer("q_lora_rank") if "q_lora_rank" in config else None
    bias = config.flag("attention_bias", False)
    if bias and query_rank is None:
        raise config.wrong("attention_bias", "false without q_lora_rank")
    return LatentAttention(
        heads=config.integer("num_attention_heads"),
        rank=config.integer("kv_lora_rank", 512),
        rotated=rotated,
        key_dim=key_dim,
        value_dim=config.integer("v_head_dim", 128),
        query_rank=query_rank,
        rope=parse_rope(config, rotated, config.integer("max_position_embeddings")),
        scale=(key_dim + rotated) ** -0.5 * score_scale(config),
        norm=_LATENT_NORM,
        interleaved=interleaved,
        bias=bias,
    )
