"""Protocols of a matrix in the forward (Linear), and of its format in memory (Form).

`choose` selects among the forms.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from engine.models.linear.matrix import Matrix, StoredExpert
from kernels.experts.grouped_mlp import Gate, by_expert, gated
from kernels.quantised import QuantFormat

# In the order of experts. Biases are on the model's device, in the model's dtype.
StoredExperts: TypeAlias = Iterable[StoredExpert]


class Linear(Protocol):
    """A matrix: x -> x W^T + b, computed by the product that was chosen when the model was
    loaded."""

    def apply(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [n, in] in the model's compute dtype. n may be 0.
        Returns:
            [n, out] of x's dtype. Other rows may only change the summation order of a row.
        """
        ...


class ExpertNet(Protocol):
    """The gated feed-forward nets of a layer's experts."""

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts.

        Args:
            x: contiguous [n, hidden], in the model's compute dtype.
            weights, ids: float32 and int32 [n, k], from `route`.
        Returns:
            [n, hidden] of x's dtype.
        """
        ...


class SlottedExperts(ExpertNet, Protocol):
    """An ExpertNet in which single experts can be replaced."""

    def slot(self, number: int) -> object:
        """Return the weights of one expert, for `refill`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SeparateLinear:
    """One pair of matrices per expert. For CPUs only, because the host reads which experts are
    used.

    Attributes:
        nets: gate_up and down of each expert, in any form.
    """

    gate: Gate
    nets: tuple[tuple[Linear, Linear], ...]

    def slot(self, number: int) -> tuple[Linear, Linear]:
        return self.nets[number]

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        def net(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = self.nets[expert]
            return down.apply(gated(gate_up.apply(rows), self.gate))

        return by_expert(x, weights, ids, net, len(self.nets))


class Form(ABC):
    """A format of matrices in memory. All matrices of a model have the same form."""

    __slots__ = ()

    @abstractmethod
    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        """Convert a stored matrix. It stays quantised if this form supports its format.

        Args:
            matrix: may be mapped from the checkpoint file. It is read now and never again.
            bias: [out], on the model's device in the model's dtype. The Linear takes ownership.
        """

    @abstractmethod
    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        """Return the bytes of the Linear that `hold` creates for a matrix [rows, columns] in the
        format `stored`. Its bias and the padding of panels are not included.
        """

    def keeps(self, stored: QuantFormat, inputs: int) -> bool:
        """Return whether matrices of a format with `inputs` inputs stay as they are stored."""
        return False

    def rounded(self, matrix: Matrix) -> Matrix:
        """Return a matrix with numbers rounded as this form needs them. A rank rounds whole rows
        before it takes its part, so that its numbers are the same as in the whole model."""
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        """Return the head that is tied to the embedding [vocabulary, hidden]. The embedding stays
        in use, and is shared if this form supports that."""
        return self.hold(Matrix(embedding))

    def tied_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that `tied` allocates in addition to the embedding."""
        return self.num_bytes(rows, columns)

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SlottedExperts:
        """Convert `count` experts, each by itself. Their matrices are read now and never again."""
        nets = []
        for one in stored:
            gate_up = self.hold(one.gate_up, one.gate_up_bias)
            nets.append((gate_up, self.hold(one.down, one.down_bias)))
        return SeparateLinear(gate, tuple(nets))
