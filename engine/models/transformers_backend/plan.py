"""The tensor parallelism plan of a class: parameters that are cut, and modules that exchange
outputs.

transformers applies such a plan through torch.distributed. Baton reads it and applies it by itself:
it gives a class the parameters of one rank, and lets modules exchange outputs between the ranks.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.kv_cache.states import own_heads
from engine.models.linear import gathered, own_outputs, scaled
from engine.ranks import Group, Share

# Dimensions of a matrix [outputs, inputs], also for a stack of matrices.
_OUTPUTS, _INPUTS = -2, -1


class UnsupportedModel(Exception):
    """The class cannot be served. The text is the end of a sentence whose subject is the class."""


# Names of products of an attention module whose outputs are KV heads.
_OF_KV = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Style:
    """The effect of an entry of a plan.

    Attributes:
        cut: dimension along which matrices are cut. None: every rank has whole matrices.
        packed: whether that dimension has two matrices, each of which is cut.
        before: change of the module's input: this rank's part of it, or the input divided by the
            number of ranks.
        after: change of the module's output: the sum over all ranks, or the concatenated outputs of
            all ranks.
    """

    cut: int | None = None
    packed: bool = False
    before: Literal["", "part", "quotient"] = ""
    after: Literal["", "sum", "gather"] = ""


_NONE = Style()
_STYLES: Mapping[str, Style] = {
    "colwise": Style(_OUTPUTS),
    "colwise_gather_output": Style(_OUTPUTS, after="gather"),
    "colwise_rep": Style(_OUTPUTS, after="gather"),
    "packed_colwise": Style(_OUTPUTS, packed=True),
    "rowwise": Style(_INPUTS, after="sum"),
    "rowwise_split_input": Style(_INPUTS, before="part", after="sum"),
    "rowwise_rep": Style(_INPUTS, before="part", after="sum"),
    "packed_rowwise": Style(_INPUTS, packed=True),
    "moe_tp_experts": Style(after="sum"),
    "moe_identity_expert": Style(before="quotient"),  # every rank adds its output to that sum
    "all_reduce": Style(after="sum"),
    # Embeddings stay whole. The others are for gradients, or for parameters with their own entries.
    "embedding_rowwise": _NONE,
    "embedding_colwise": _NONE,
    "local_params": _NONE,
    "mla_kv_a_proj": _NONE,
    "replicate": _NONE,
    "replicated_with_grad_allreduce": _NONE,
}


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """The part of a parameter that a rank has.

    Attributes:
        dim: dimension that is cut.
        count: number of tensors of equal size along it, each of which is cut.
        kv_heads: number of heads in this dimension, which ranks may share. 0: the dimension has no
            heads.
        uneven: whether the ranks may have parts of different sizes.
        first_only: whether rank 0 has everything, and the other ranks nothing.
    """

    name: str
    dim: int = -1
    count: int = 1
    kv_heads: int = 0
    uneven: bool = False
    first_only: bool = False

    def of(self, whole: Tensor, share: Share) -> Tensor:
        """Return the part of a rank that has one. It may share memory with `whole`. Raise
        ConfigError if the ranks cannot have equal parts."""
        if self.first_only:
            return whole
        size = whole.shape[self.dim] // self.count
        if self.uneven:
            own = own_outputs(size, share)
        elif self.kv_heads:
            heads = own_heads(self.kv_heads, share.rank, share.size)
            own = scaled(heads, size // self.kv_heads)
        else:
            own = share.part(size, f"numbers of {self.name}")
        starts = [own.start + number * size for number in range(self.count)]
        kept = [whole.narrow(self.dim, start, len(own)) for start in starts]
        return kept[0] if self.count == 1 else torch.cat(kept, self.dim)


@dataclass(frozen=True, slots=True)
class ConnectedModule:
    """A module whose input or output depends on other ranks.

    Attributes:
        inputs, outputs: sizes of the whole product. 0: the module is not a product.
    """

    style: Style
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """The plan of a class, for any number of ranks.

    Attributes:
        cuts: by name of the parameter.
        connected: by name of the module.
        tied: name of the head's matrix if it is tied to the embedding. Otherwise "".
        refused: reason why ranks cannot divide the class, like the text of UnsupportedModel, or "".
    """

    cuts: Mapping[str, ParameterCut]
    connected: Mapping[str, ConnectedModule]
    tied: str
    refused: str

    @classmethod
    def of(cls, model: PreTrainedModel, kv_heads: Mapping[str, int]) -> "TensorPlan":
        """Read the plan of a class without weights.

        Args:
            kv_heads: number of KV heads by name of an attention module.
        """
        entries: Mapping[str, str] = model.tp_plan or {}
        cuts: dict[str, ParameterCut] = {}
        connected: dict[str, ConnectedModule] = {}
        refused = ""
        try:
            for name, module in model.named_modules():
                style = _style(name, entries)
                parent, _, leaf = name.rpartition(".")
                heads = kv_heads.get(parent, 0) if leaf in _OF_KV else 0
                cuts.update(_cuts_of(name, module, style, entries, heads))
                if style.before or style.after:
                    outputs, inputs = module.weight.shape if _is_product(module) else (0, 0)
                    connected[name] = ConnectedModule(style, inputs, outputs)
            _check_sums(model, cuts, connected)
        except UnsupportedModel as error:
            refused = str(error)
        if not refused and all(cut.uneven for cut in cuts.values()):
            refused = "transformers has no tensor-parallel plan for it"
        return cls(cuts, connected, _tied(model), refused)

    def splits(self, module: str) -> bool:
        """Return whether a product inside `module` has different outputs on each rank."""
        return any(
            name.startswith(f"{module}.") and cut.dim == _OUTPUTS and not cut.uneven
            for name, cut in self.cuts.items()
        )


def _check_sums(
    model: PreTrainedModel,
    cuts: Mapping[str, ParameterCut],
    connected: Mapping[str, ConnectedModule],
) -> None:
    """Raise UnsupportedModel if a module sums outputs that include an equal part from every
    rank."""
    summed = [name for name, own in connected.items() if own.style.after == "sum"]
    for name in summed:
        if connected[name].outputs:
            continue  # a product, whose bias only rank 0 has
        inside = [f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()]
        whole = [each for each in inside if each not in cuts]
        added = [each for each in summed if each.startswith(f"{name}.")]
        if added:
            raise UnsupportedModel(
                f"its tensor-parallel plan sums the outputs of both {name} and {added[0]}"
            )
        if whole or not inside:
            what = whole[0] if whole else "its parameters"
            raise UnsupportedModel(
                f"its tensor-parallel plan sums the outputs of {name}, but does not split {what}"
            )


def _tied(model: PreTrainedModel) -> str:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    return f"{names[0]}.weight" if names and head.weight is embedding.weight else ""


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _style(name: str, entries: Mapping[str, str]) -> Style:
    """Return the style of a module or a parameter. Plans have * instead of layer numbers."""
    kind = entries.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "replicate")
    if kind not in _STYLES:
        raise UnsupportedModel(
            f"its tensor-parallel plan has the unsupported style {kind} for {name}"
        )
    return _STYLES[kind]


def _cuts_of(
    name: str, module: nn.Module, style: Style, entries: Mapping[str, str], kv_heads: int
) -> Iterator[tuple[str, ParameterCut]]:
    """Yield the cuts of a module's own parameters.

    Args:
        kv_heads: number of KV heads among the module's outputs, or 0.
    Raises:
        UnsupportedModel: the plan is not supported.
    """
    if style.cut is not None and not _is_product(module):
        raise UnsupportedModel(
            f"its tensor-parallel plan splits {name}, which is not a linear layer"
        )
    for leaf, parameter in module.named_parameters(recurse=False):
        of_leaf = f"{name}.{leaf}" if name else leaf
        own = _style(of_leaf, entries)
        if own.cut is not None:
            if parameter.ndim > 1 and style.after != "sum":
                raise UnsupportedModel(
                    f"its tensor-parallel plan splits {of_leaf}, but does not sum its outputs"
                )
            dim = own.cut if parameter.ndim > 1 else -1
            yield of_leaf, ParameterCut(of_leaf, dim, 1 + own.packed)
        elif style.cut is not None:
            is_bias, uneven = parameter.ndim == 1, style.after == "gather"
            dim = -1 if is_bias else style.cut
            first_only = is_bias and style.cut == _INPUTS
            yield (
                of_leaf,
                ParameterCut(of_leaf, dim, 1 + style.packed, kv_heads, uneven, first_only),
            )


def cut(model: PreTrainedModel, plan: TensorPlan, share: Share) -> None:
    """Reduce every parameter to a rank's part. Raise ConfigError if ranks cannot have equal
    parts."""
    for module, cuts in _by_module(model, plan):
        for leaf in cuts:
            _register(module, cuts, share, leaf, module.get_parameter(leaf))
    cut_tied(model, plan, share)


def cut_tied(model: PreTrainedModel, plan: TensorPlan, share: Share) -> None:
    """Reduce a tied head to a rank's part. The embedding stays whole, and keeps the memory of
    both."""
    if plan.tied in plan.cuts:
        head = model.get_output_embeddings()
        own = plan.cuts[plan.tied].of(head.weight.detach(), share)
        head.weight = nn.Parameter(own, requires_grad=False)


def cutting(kind: type[PreTrainedModel], plan: TensorPlan, share: Share) -> type[PreTrainedModel]:
    """Return a subclass of `kind` that reduces each parameter when it is loaded, so that only one
    at a time is in memory whole. Call `loaded` and `cut_tied` afterwards."""

    def init(model: PreTrainedModel, *given: Any, **named: Any) -> None:
        kind.__init__(model, *given, **named)
        for module, cuts in _by_module(model, plan):
            # torch calls it when a parameter is assigned.
            module.__dict__["register_parameter"] = partial(_register, module, cuts, share)

    names = {"__init__": init, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


def loaded(model: PreTrainedModel, plan: TensorPlan) -> None:
    """End the effect of `cutting`."""
    for module, _ in _by_module(model, plan):
        del module.__dict__["register_parameter"]


def _by_module(
    model: PreTrainedModel, plan: TensorPlan
) -> list[tuple[nn.Module, Mapping[str, ParameterCut]]]:
    """Return the modules with parameters that are cut, and the cuts by parameter name inside the
    module."""
    found: dict[str, dict[str, ParameterCut]] = defaultdict(dict)
    for name, each in plan.cuts.items():
        module, _, leaf = name.rpartition(".")
        if name != plan.tied:
            found[module][leaf] = each
    return [(model.get_submodule(module), cuts) for module, cuts in found.items()]


def _register(
    module: nn.Module,
    cuts: Mapping[str, ParameterCut],
    share: Share,
    leaf: str,
    parameter: nn.Parameter | None,
) -> None:
    """Set a parameter of a module, or this rank's part of it. The rest is freed."""
    if parameter is not None and leaf in cuts:
        if cuts[leaf].first_only and share.rank:
            parameter = None
        else:
            own = cuts[leaf].of(parameter.data, share)
            parameter.data = own.clone(memory_format=torch.contiguous_format)
    nn.Module.register_parameter(module, leaf, parameter)


def connect(model: PreTrainedModel, plan: TensorPlan, group: Group) -> None:
    """Make the modules of `model` exchange their inputs and outputs with the other ranks."""
    for name, own in plan.connected.items():
        module = model.get_submodule(name)
        if own.style.before:
            before = _part if own.style.before == "part" else _quotient
            module.register_forward_pre_hook(partial(before, own, group))
        if own.style.after:
            after = _sum if own.style.after == "sum" else _gather
            module.register_forward_hook(partial(after, own, group))


def _part(own: ConnectedModule, group: Group, _: nn.Module, given: tuple[Any, ...]) -> Any:
    x, *others = given
    part = Share(group.rank, group.size).part(own.inputs, "inputs of a product")
    return x[..., part.start : part.stop], *others


def _quotient(own: ConnectedModule, group: Group, _: nn.Module, given: tuple[Any, ...]) -> Any:
    x, *others = given
    return x / group.size, *others


def _sum(own: ConnectedModule, group: Group, _: nn.Module, given: Any, output: Tensor) -> Tensor:
    return group.all_reduce(output.contiguous())


def _gather(own: ConnectedModule, group: Group, _: nn.Module, given: Any, output: Tensor) -> Tensor:
    return gathered(output.contiguous(), own.outputs, group)


class ShapeGroup:
    """A Group for modules without weights. Only the shapes of its results are correct."""

    def __init__(self, share: Share) -> None:
        self.rank, self.size = share.rank, share.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        return x

    def close(self) -> None:
        pass
