"""What the forward knows of a matrix, and what the loader knows of a way to hold matrices.

Which forms there are is said elsewhere: `choose` names them.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from engine.models.linear.matrix import Matrix, StoredExpert
from kernels.experts.grouped_mlp import Gate

# One after the other; biases on the model's device in the model's dtype.
StoredExperts: TypeAlias = Iterable[StoredExpert]


class Linear(Protocol):
    """x -> x W^T + b, by the product that was chosen when the matrix was loaded."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes, and what one product of few rows reads; without the bias."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """
        Args:
            x: [n, in], n may be 0, in the dtype that the model computes in.
        Returns:
            [n, out] of x's dtype. No row depends on the others but by the order of its sums.
        """
        ...


class ExpertNet(Protocol):
    """The gated feed-forward nets of a layer's experts."""

    @property
    def nbytes(self) -> int:
        """Memory that all of them take."""
        ...

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Each token's weighted sum over its experts.

        Args:
            x: contiguous [n, hidden], in the dtype that the model computes in.
            weights, ids: float32 and int32 [n, k], of `route`.
        Returns:
            [n, hidden] of x's dtype.
        """
        ...


class Form(Protocol):
    """A way to hold matrices; the same one for all matrices of a model."""

    def hold(self, stored: Tensor, bias: Tensor | None) -> Linear:
        """
        Args:
            stored: [out, in] as the checkpoint has it, perhaps mapped from its file: it is read
                here and never again.
            bias: [out], on the model's device in the model's dtype; becomes the Linear's.
        """
        ...

    def hold_int8(self, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Linear:
        """The same of int8 [out, in] with a scale for each row, float32 [out]: multiplied as it is
        where this form multiplies those, else as floats."""
        ...

    def tied(self, embedding: Tensor) -> Linear:
        """The head that is the embedding [vocabulary, hidden], which lives on beside it and is
        shared where this form can compute with it as it is."""
        ...

    def experts(self, stored: StoredExperts, count: int, gate: Gate) -> ExpertNet:
        """The nets of `count` experts, of matrices that are read here and never again."""
        ...

    def num_bytes(self, rows: int, columns: int) -> int:
        """What `hold` takes for a matrix [rows, columns]: its Linear's nbytes."""
        ...

    def int8_bytes(self, rows: int, columns: int) -> int:
        """What `hold_int8` takes for such a matrix."""
        ...

    def tied_bytes(self, rows: int, columns: int) -> int:
        """What `tied` takes beside the embedding."""
        ...


def held(form: Form, matrix: Matrix, bias: Tensor | None = None) -> Linear:
    """A stored matrix in `form`: int8 as it is, where the form multiplies that."""
    if matrix.scale is None:
        return form.hold(matrix.numbers, bias)
    return form.hold_int8(matrix.numbers, matrix.scale, bias)
