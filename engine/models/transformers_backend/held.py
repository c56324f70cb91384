"""Conversion of a class's matrices to the form for this machine, and replacement of their values.

Only modules that multiply by a matrix and add a bias are converted. Stacked experts, and matrices
that a class multiplies in its own code, stay as they were loaded.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.process.resources import trim
from engine.models.linear import Form, Linear, Matrix
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


def parts_of(modules: Sequence[nn.Module]) -> list[object]:
    """Return the objects that hold numbers, as arguments of `refill`: the class's own tensors, and
    converted products."""
    parts: list[object] = []
    for module in chain.from_iterable(each.modules() for each in modules):
        parts += module.parameters(recurse=False)
        parts += module.buffers(recurse=False)
        if isinstance(module, WeightHolder):
            parts.append(module.linear)
    return parts
