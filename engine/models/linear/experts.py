"""The feed-forward nets of experts: all in two stacked tensors, or one pair of matrices each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.matrix import Matrix
from engine.models.linear.protocol import Form, Linear, StoredExperts
from kernels.experts.grouped_mlp import ExpertMatrices, Gate, by_expert, gated, grouped_mlp
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

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._tensors if part is not None)

    def slot(self, number: int) -> tuple[Tensor | None, ...]:
        return tuple(None if part is None else part[number] for part in self._tensors)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return grouped_mlp(x, self.gate_up, self.down, weights, ids, self.gate)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.gate_up.tensors, *self.down.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class SeparateLinear:
    """One pair of matrices per expert. For CPUs only, because the host reads which experts are
    used.

    Attributes:
        nets: gate_up and down of each expert, in any form.
        bias_bytes: memory of their biases.
    """

    gate: Gate
    nets: tuple[tuple[Linear, Linear], ...]
    bias_bytes: int

    @property
    def nbytes(self) -> int:
        return self.bias_bytes + sum(gate_up.nbytes + down.nbytes for gate_up, down in self.nets)

    def slot(self, number: int) -> tuple[Linear, Linear]:
        return self.nets[number]

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        def net(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = self.nets[expert]
            return down.apply(gated(gate_up.apply(rows), self.gate))

        return by_expert(x, weights, ids, net, len(self.nets))


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


def each(form: Form, stored: StoredExperts, gate: Gate) -> SeparateLinear:
    nets, bias_bytes = [], 0
    for one in stored:
        gate_up = form.hold(one.gate_up, one.gate_up_bias)
        nets.append((gate_up, form.hold(one.down, one.down_bias)))
        for bias in (one.gate_up_bias, one.down_bias):
            bias_bytes += 0 if bias is None else bias.nbytes
    return SeparateLinear(gate, tuple(nets), bias_bytes)
