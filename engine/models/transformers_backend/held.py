"""A class's matrices in the form that this machine multiplies them in, and other numbers in them.

Only modules that multiply by a matrix and add a bias, and do nothing else. Experts that a class
keeps as one stack, and matrices that it multiplies by in its own code, stay as they were loaded.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import EngineFault
from common.process.allocator import trim
from engine.models.linear import Form, Linear
from engine.models.refill import drain, refill
from engine.models.transformers_backend.skeleton import products


class Held(nn.Module):
    """Stands where a product was. Its `weight` has a shape and a dtype, and no numbers."""

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
    """Matrix [out, in] and bias [out]."""
    named = dict(module.named_parameters())
    weight, bias = named["weight"].detach(), named.get("bias")
    matrix = weight if type(module) is nn.Linear else weight.T  # GPT-2's has inputs first
    return matrix, None if bias is None else bias.detach()


def hold(model: PreTrainedModel, form: Form) -> None:
    """Every product of `model` by `form`, one matrix of it twice in memory at a time."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    for name, outputs in [(name, outputs) for name, _, outputs, _ in products(model)]:
        module = model.get_submodule(name)
        weight, bias = _numbers(module)
        if module is head and weight.data_ptr() == embedding.data_ptr():
            linear = form.tied(weight)
        else:
            linear = form.hold(weight, bias)
        parent, _, leaf = name.rpartition(".")
        held = Held(linear, outputs, weight)
        model.get_submodule(parent).register_module(leaf, held)
        del module, weight
        trim()


def refill_modules(present: Sequence[nn.Module], fresh: Sequence[nn.Module]) -> None:
    """Copies all that modules of the same classes have to its places in `present`. Raises
    EngineFault as `refill`."""
    here, there = list(_places(present)), list(_places(fresh))
    if len(here) != len(there):
        raise EngineFault("the weights differ in more than numbers")
    for pair in zip(here, there, strict=True):
        refill(*pair)


def drain_modules(present: Sequence[nn.Module]) -> None:
    """Gives the memory of all that they have back to the system, until `refill_modules`."""
    for place in _places(present):
        drain(place)


def _places(modules: Sequence[nn.Module]) -> Iterator[object]:
    """What numbers are in: tensors as the class has them, and products that are held."""
    for module in chain.from_iterable(each.modules() for each in modules):
        yield from (each.detach() for each in module.parameters(recurse=False))
        yield from module.buffers(recurse=False)
        if isinstance(module, Held):
            yield module.linear
