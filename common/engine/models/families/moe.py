"""What families with experts say in the same words."""

from collections.abc import Sequence

from common.engine.models.blocks.dense import Dense
from common.engine.models.blocks.experts import Experts
from common.engine.models.families import common
from common.engine.models.fields import Fields
from kernels.experts.routing import Routing


def experts(config: Fields, *, shared: Dense | None = None, normalise: bool = False) -> Experts:
    """Of Qwen, and of those that copy its names.

    Args:
        normalise: weights of those chosen sum to 1, where the configuration does not say.
    """
    # transformers 5 writes the second name for some of them.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    count = config.integer(name)
    routing = Routing(per_token(config, count), config.flag("norm_topk_prob", normalise))
    return Experts(
        count=count,
        intermediate_size=config.integer("moe_intermediate_size"),
        gate=common.activation(config),
        routing=routing,
        shared=shared,
        shared_gate=shared is not None,
    )


def shared_expert(config: Fields) -> Dense:
    """Of Qwen: the one beside them."""
    return Dense(
        config.integer("shared_expert_intermediate_size"),
        common.activation(config),
        module="mlp.shared_expert",
    )


def deepseek_experts(config: Fields) -> Experts:
    """Of DeepSeek-V3, and of those that copy its names: by sigmoids, out of a few groups."""
    count, inner = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    activation, shared = common.activation(config), config.count("n_shared_experts", 0)
    groups, chosen = config.integer("n_group", 1), config.integer("topk_group", 1)
    if count % groups or count // groups < 2:
        raise config.wrong("n_group", f"a number of groups, of two at least, of {count} experts")
    if chosen > groups:
        raise config.wrong("topk_group", f"at most {groups} groups")
    return Experts(
        count=count,
        intermediate_size=inner,
        gate=activation,
        routing=Routing(
            per_token(config, chosen * (count // groups)),
            config.flag("norm_topk_prob", False),
            scores="sigmoid",
            scale=config.number("routed_scaling_factor", 1.0),
            groups=groups,
            chosen_groups=chosen,
            group_top=2,
        ),
        exact_router=True,
        shared=Dense(shared * inner, activation, module="mlp.shared_experts") if shared else None,
    )


def per_token(config: Fields, most: int, default: int | None = None) -> int:
    """Raises ConfigError where a token would need more experts than there are for it."""
    found = config.integer("num_experts_per_tok", default)
    if found > most:
        raise config.wrong("num_experts_per_tok", f"at most {most} experts")
    return found


def nets(config: Fields, sparse: Experts) -> Sequence[Dense | Experts]:
    """Of each layer: experts in every `decoder_sparse_step`th, but for `mlp_only_layers`."""
    dense, every = common.dense(config), config.integer("decoder_sparse_step", 1)
    plain = config.counts("mlp_only_layers")
    return [
        sparse if layer not in plain and (layer + 1) % every == 0 else dense
        for layer in range(config.integer("num_hidden_layers"))
    ]
