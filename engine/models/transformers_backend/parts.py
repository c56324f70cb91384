"""A class with the parameters of one rank, and the exchange between the ranks."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.linear import gathered
from engine.models.transformers_backend.plan import ConnectedModule, ParameterCut, TensorPlan
from engine.ranks import Group, Share


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
