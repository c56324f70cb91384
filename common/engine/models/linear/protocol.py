"""What the forward knows of a matrix, and what the loader knows of a way to hold matrices.

Which forms there are is said elsewhere: `choose` names them.
"""

from typing import Protocol

from torch import Tensor


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

    def tied(self, embedding: Tensor) -> Linear:
        """The head that is the embedding [vocabulary, hidden], which lives on beside it and is
        shared where this form can compute with it as it is."""
        ...

    def num_bytes(self, rows: int, columns: int) -> int:
        """What `hold` takes for a matrix [rows, columns]: its Linear's nbytes."""
        ...

    def tied_bytes(self, rows: int, columns: int) -> int:
        """What `tied` takes beside the embedding."""
        ...
