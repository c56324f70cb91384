"""Protocols: a matrix as the forward uses it, and a form as the loader uses it.

`choose` selects among the forms.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from engine.models.linear.matrix import Matrix, StoredExpert
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat

# In order of the experts. Biases are on the model's device in the model's dtype.
StoredExperts: TypeAlias = Iterable[StoredExpert]


class Linear(Protocol):
    """A matrix: x -> x W^T + b, by the product that was chosen at load time."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the bias. A product of few rows reads as many bytes."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [n, in] in the model's compute dtype. n may be 0.
        Returns:
            [n, out] of x's dtype. Other rows affect a row only by the order of its sums.
        """
        ...


class ExpertNet(Protocol):
    """The gated feed-forward nets of a layer's experts."""

    @property
    def nbytes(self) -> int:
        """Memory of all experts in bytes."""
        ...

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts.

        Args:
            x: contiguous [n, hidden], in the model's compute dtype.
            weights, ids: float32 and int32 [n, k], of `route`.
        Returns:
            [n, hidden] of x's dtype.
        """
        ...


class SlottedExperts(ExpertNet, Protocol):
    """An ExpertNet in which single experts can be replaced."""

    def slot(self, number: int) -> object:
        """Return the weights of one expert, for `refill`."""
        ...


class Form(Protocol):
    """A format in which matrices are held in memory. All matrices of a model use the same one."""

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        """Convert a stored matrix. It stays quantised if this form multiplies its format.

        Args:
            matrix: possibly mapped from the checkpoint file. It is read here and never again.
            bias: [out], on the model's device in the model's dtype. The Linear takes ownership.
        """
        ...

    def rounded(self, matrix: Matrix) -> Matrix:
        """Return a matrix in the numbers that this form multiplies. A rank rounds whole rows before
        it cuts them, so that its numbers are those of the whole model."""
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        """Return the head that is tied to the embedding [vocabulary, hidden]. The embedding remains
        in use, and is shared if this form can compute with it."""
        return self.hold(Matrix(embedding))

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SlottedExperts:
        """Convert `count` experts. Their matrices are read here and never again."""
        ...

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        """Return the bytes that `hold` allocates for a matrix [rows, columns] that is stored so:
        its Linear's nbytes."""
        ...

    def tied_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that `tied` allocates in addition to the embedding."""
        return self.num_bytes(rows, columns)
