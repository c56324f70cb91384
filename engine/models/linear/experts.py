"""The feed-forward nets of experts in two stacked tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import StoredExperts
from kernels.experts.grouped_mlp import ExpertMatrices, Gate, grouped_mlp
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class StackedLinear:
    """All experts in two stacked tensors.

    Attributes:
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
    """

    gate: Gate
    gate_up: ExpertMatrices
    down: ExpertMatrices

    def slot(self, number: int) -> tuple[Tensor | None, ...]:
        tensors = (*self.gate_up.tensors, *self.down.tensors)
        return tuple(None if each is None else each[number] for each in tensors)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return grouped_mlp(x, self.gate_up, self.down, weights, ids, self.gate)


def stack(
    stored: StoredExperts,
    count: int,
    gate: Gate,
    device: torch.device,
    dtype: torch.dtype,
    keeps: Callable[[QuantFormat | None], bool] = lambda stored: False,
) -> StackedLinear:
    """Copy the experts one after the other to their final place.

    Args:
        keeps: returns whether matrices of a format stay as stored. Others become floats.
    """
    stacks: list[ExpertMatrices] = []
    for number, one in enumerate(stored):
        pairs = ((one.gate_up, one.gate_up_bias), (one.down, one.down_bias))
        parts = [_as_held(*pair, dtype, keeps) for pair in pairs]
        stacks = stacks or [_empty(part, count, device) for part in parts]
        for whole, part in zip(stacks, parts, strict=True):
            for here, there in zip(whole.tensors, part.tensors, strict=True):
                if here is not None and there is not None:
                    here[number].copy_(there)
    return StackedLinear(gate, *stacks)


def _as_held(
    matrix: Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    keeps: Callable[[QuantFormat | None], bool],
) -> ExpertMatrices:
    """Return the matrix of one expert in its final format, without the first dimension."""
    if not keeps(matrix.format):
        return ExpertMatrices(matrix.floats().to(dtype), bias)
    numbers, quantisation = matrix.quantised()
    return ExpertMatrices(numbers, bias, quantisation)


def _empty(one: ExpertMatrices, count: int, device: torch.device) -> ExpertMatrices:
    """Return memory for `count` matrices like this one."""

    def like(part: Tensor) -> Tensor:
        return torch.empty((count, *part.shape), dtype=part.dtype, device=device)

    bias, quantisation = one.bias, one.quantisation
    return ExpertMatrices(
        like(one.numbers),
        None if bias is None else like(bias),
        None if quantisation is None else quantisation.with_tensors(like),
    )
