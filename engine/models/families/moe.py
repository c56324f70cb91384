"""Configuration fields that families with experts share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from engine.models.blocks.experts import DenseMlp, Experts
from engine.models.families import common
from engine.models.fields import Fields
from kernels.experts.routing import Routing


def experts(config: Fields, *, shared: bool = False, normalise: bool = False) -> Experts:
    """Return the experts of Qwen, and of families that copy its field names.

    Args:
        shared: whether there is a shared expert.
        normalise: default of whether the weights of the chosen experts sum to 1.
    """
    activation = common.activation(config)
    net = None
    if shared:
        size = config.integer("shared_expert_intermediate_size")
        net = DenseMlp(size, activation, module="mlp.shared_expert")
    # transformers 5 writes the second name for some families.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    count = config.integer(name)
    routing = Routing(per_token(config, count), config.flag("norm_topk_prob", normalise))
    return Experts(
        count=count,
        intermediate_size=config.integer("moe_intermediate_size"),
        gate=activation,
        routing=routing,
        shared=net,
        shared_gate=shared,
    )


def deepseek_experts(
    config: Fields,
    *,
    groups: int = 1,
    chosen: int = 1,
    shared: int = 0,
    scale: float = 1.0,
    normalise: bool = False,
) -> Experts:
    """Return the experts of DeepSeek-V3, and of families with the same field names. The router uses
    sigmoids and chooses from a few groups.

    Args:
        groups, chosen, shared, scale, normalise: defaults of absent fields.
    """
    groups, chosen = config.integer("n_group", groups), config.integer("topk_group", chosen)
    routing = replace(
        _grouped(config, groups, chosen, 2),
        scores="sigmoid",
        scale=config.number("routed_scaling_factor", scale),
        normalise=config.flag("norm_topk_prob", normalise),
    )
    return replace(_deepseek(config, routing, shared), choice_bias=True)


def deepseek_v2_experts(config: Fields) -> Experts:
    """Return the experts of DeepSeek-V2. The router uses a softmax over all experts, optionally
    limited to a few groups."""
    method, groups, chosen = config.text("topk_method", "greedy"), 1, 1
    if method == "group_limited_greedy":
        groups, chosen = config.integer("n_group"), config.integer("topk_group")
    elif method != "greedy":
        raise config.wrong("topk_method", "greedy or group_limited_greedy")
    if config.flag("norm_topk_prob", False):
        raise config.wrong("norm_topk_prob", "false")
    scale = config.number("routed_scaling_factor", 1.0)
    return _deepseek(config, replace(_grouped(config, groups, chosen, 1), scale=scale), 2)


def _deepseek(config: Fields, routing: Routing, shared: int) -> Experts:
    inner, activation = config.integer("moe_intermediate_size"), common.activation(config)
    shared = config.count("n_shared_experts", shared)
    net = DenseMlp(shared * inner, activation, module="mlp.shared_experts") if shared else None
    return Experts(
        count=config.integer("n_routed_experts"),
        intermediate_size=inner,
        gate=activation,
        routing=routing,
        exact_router=True,
        shared=net,
    )


def _grouped(config: Fields, groups: int, chosen: int, top: Literal[1, 2]) -> Routing:
    """Return a softmax routing whose probabilities are the weights. Groups are ranked by their
    `top` most likely experts."""
    count = config.integer("n_routed_experts")
    size, odd = divmod(count, groups)
    if odd or size < top:
        raise config.wrong("n_group", f"a number of groups, of {top} at least, of {count} experts")
    if chosen > groups:
        raise config.wrong("topk_group", f"at most {groups} groups")
    return Routing(
        per_token(config, chosen * size),
        normalise=False,
        groups=groups,
        chosen_groups=chosen,
        group_top=top,
    )


def per_token(config: Fields, most: int, default: int | None = None) -> int:
    """Return the number of experts per token. Raise ConfigError if it exceeds the number of
    experts."""
    found = config.integer("num_experts_per_tok", default)
    if found > most:
        raise config.wrong("num_experts_per_tok", f"at most {most} experts")
    return found


def nets_after(
    config: Fields, dense: DenseMlp, sparse: Experts, first_sparse: int
) -> Sequence[DenseMlp | Experts]:
    """Return the feed-forward net of each layer: experts after the first layers.

    Args:
        first_sparse: default of the first layer with experts.
    """
    first = config.count("first_k_dense_replace", first_sparse)
    return [sparse if layer >= first else dense for layer in range(common.num_layers_of(config))]


def nets(config: Fields, sparse: Experts) -> Sequence[DenseMlp | Experts]:
    """Return the feed-forward net of each layer: experts in every `decoder_sparse_step`th layer,
    except `mlp_only_layers`."""
    dense, every = common.dense(config), config.integer("decoder_sparse_step", 1)
    plain = config.counts("mlp_only_layers")
    return [
        sparse if layer not in plain and (layer + 1) % every == 0 else dense
        for layer in range(common.num_layers_of(config))
    ]
