"""Conversion of a class's matrices to the form for this machine, and replacement of their values.

Only modules that multiply by a matrix and add a bias are converted. Stacked experts, and matrices
that a class multiplies in its own code, stay as they were loaded.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import EngineFault
from common.process.resources import trim
from engine.models.linear import Form, Linear, Matrix
from engine.models.refill import drain, found, refill
from engine.models.transformers_backend.skeleton import products


class WeightHolder(nn.Module):
    """A module that replaces a product. Its `weight` has a shape and a dtype, but no values."""

    def __init__(self, linear: Linear, outputs: int, weight: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = outputs, weight.numel() // outputs
        self.weight = torch.empty(
            self.out_features, self.in_features, dtype=weight.dtype, device="meta"
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear.apply(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


def _numbers(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the matrix [out, in] and the bias [out]."""
    named = dict(module.named_parameters())
    weight, bias = named["weight"].detach(), named.get("bias")
    matrix = weight if type(module) is nn.Linear else weight.T  # Conv1D has inputs first
    return matrix, None if bias is None else bias.detach()


def hold(model: PreTrainedModel, form: Form) -> None:
    """Convert every product of `model` to `form`. Only one matrix at a time is in memory twice."""
    embedding = model.get_input_embeddings().weight.untyped_storage().data_ptr()
    head = model.get_output_embeddings()
    for name, outputs in [(name, outputs) for name, _, outputs, _ in products(model)]:
        module = model.get_submodule(name)
        weight, bias = _numbers(module)
        if module is head and weight.untyped_storage().data_ptr() == embedding:
            linear = form.tied(weight)
        else:
            linear = form.hold(Matrix(weight), bias)
        parent, _, leaf = name.rpartition(".")
        held = WeightHolder(linear, outputs, weight)
        model.get_submodule(parent).register_module(leaf, held)
        del module, weight
        trim()


def refill_modules(present: Sequence[nn.Module], fresh: Sequence[nn.Module]) -> None:
    """Copy all tensors of modules of the same classes into `present`. Raise EngineFault as `refill`
    does."""
    here, there = list(_places(present)), list(_places(fresh))
    if len(here) != len(there):
        raise EngineFault("the structure of the new weights differs")
    for pair in zip(here, there, strict=True):
        refill(*pair)


def drain_modules(present: Sequence[nn.Module]) -> None:
    """Return the memory of all tensors to the operating system, until `refill_modules`."""
    for place in _places(present):
        drain(place)


def tensors_of(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield all tensors that `refill_modules` fills."""
    return found(Tensor, list(_places(modules)))


def _places(modules: Sequence[nn.Module]) -> Iterator[object]:
    """Yield the objects that hold numbers: the class's own tensors, and converted products."""
    for module in chain.from_iterable(each.modules() for each in modules):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        if isinstance(module, WeightHolder):
            yield module.linear
