"""Protocols of a matrix in the forward (Linear), and of its format in memory (Form).

`choose` selects among the forms.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from engine.models.linear.matrix import Matrix, StoredExpert
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat

# In the order of experts. Biases are on the model's device, in the model's dtype.
StoredExperts: TypeAlias = Iterable[StoredExpert]


class Linear(Protocol):
    """A matrix: x -> x W^T + b, computed by the product that was chosen when the model was
    loaded."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the bias. A product of few rows reads this number of bytes."""
        ...

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

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        ...

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


class Form(Protocol):
    """A format of matrices in memory. All matrices of a model have the same form."""

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        """Convert a stored matrix. It stays quantised if this form supports its format.

        Args:
            matrix: may be mapped from the checkpoint file. It is read now and never again.
            bias: [out], on the model's device in the model's dtype. The Linear takes ownership.
        """
        ...

    def rounded(self, matrix: Matrix) -> Matrix:
        """Return a matrix with numbers rounded as this form needs them. A rank rounds whole rows
        before it takes its part, so that its numbers are the same as in the whole model."""
        return matrix

    def tied(self, embedding: Tensor) -> Linear:
        """Return the head that is tied to the embedding [vocabulary, hidden]. The embedding stays
        in use, and is shared if this form supports that."""
        return self.hold(Matrix(embedding))

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> SlottedExperts:
        """Convert `count` experts. Their matrices are read now and never again."""
        ...

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        """Return the bytes (nbytes) of the Linear that `hold` creates for a matrix [rows, columns]
        in the format `stored`."""
        ...

    def tied_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that `tied` allocates in addition to the embedding."""
        return self.num_bytes(rows, columns)
