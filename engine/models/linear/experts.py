"""The feed-forward nets of experts: all in two stacks, or each as its own pair of matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear.protocol import Form, Linear, StoredExperts, held
from kernels.experts.grouped_mlp import Gate, by_expert, gated, grouped_mlp


@dataclass(frozen=True, slots=True, eq=False)
class StackedLinear:
    """All experts in two stacks.

    Attributes:
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        gate_up_bias, down_bias: a bias for each row, or None.
    """

    gate: Gate
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)

    def slot(self, number: int) -> tuple[Tensor | None, ...]:
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return tuple(None if part is None else part[number] for part in parts)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return grouped_mlp(
            x,
            self.gate_up,
            self.down,
            weights,
            ids,
            self.gate,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SeparateLinear:
    """One pair of matrices per expert. Reads from the device which experts are used, so it is for
    CPUs.

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
    stored: StoredExperts, count: int, gate: Gate, device: torch.device, dtype: torch.dtype
) -> StackedLinear:
    """Copy one expert after the other to its final place."""
    stacks: list[Tensor | None] = []
    for number, one in enumerate(stored):
        parts = (one.gate_up.floats(), one.down.floats(), one.gate_up_bias, one.down_bias)
        stacks = stacks or [
            None if part is None else torch.empty((count, *part.shape), dtype=dtype, device=device)
            for part in parts
        ]
        for whole, part in zip(stacks, parts, strict=True):
            if whole is not None and part is not None:
                whole[number].copy_(part)
    gate_up, down, gate_up_bias, down_bias = stacks
    assert gate_up is not None and down is not None  # matrices always exist, unlike biases
    return StackedLinear(gate, gate_up, down, gate_up_bias, down_bias)


def each(form: Form, stored: StoredExperts, gate: Gate) -> SeparateLinear:
    nets, bias_bytes = [], 0
    for one in stored:
        gate_up = held(form, one.gate_up, one.gate_up_bias)
        nets.append((gate_up, held(form, one.down, one.down_bias)))
        for bias in (one.gate_up_bias, one.down_bias):
            bias_bytes += 0 if bias is None else bias.nbytes
    return SeparateLinear(gate, tuple(nets), bias_bytes)
