"""The interface through which a block requests its weights while it is built.

A block names each stored tensor once. Names, shapes, byte counts and values all derive from that
call.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.linear import ExpertNet, Linear, Product
from engine.models.quantized.experts import ExpertShape


class BlockWeights(Protocol):
    """A source of weights. Names are relative to the prefix that `within` has added."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors from this source."""
        ...

    @property
    def products(self) -> Sequence[Product]:
        """The products that `linear` has made so far, including those made through `within`."""
        ...

    def within(self, prefix: str) -> "BlockWeights": ...

    def linear(self, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> Linear:
        """Return the matrices of several modules joined along the outputs, optionally with biases.

        Args:
            rows: module -> outputs, of a stored `weight` [outputs, columns] and `bias` [outputs].
        """
        ...

    def matrix(self, module: str, rows: int, columns: int) -> Tensor:
        """Return a module's matrix [rows, columns] in the model's compute dtype, for callers that
        multiply by parts of it."""
        ...

    def experts(self, shape: ExpertShape) -> ExpertNet:
        """Return the experts stored under the module `experts`."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a stored tensor.

        Args:
            dtype: dtype of the result. None: the model's compute dtype.
        """
        ...

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a stored tensor as int64."""
        ...

    def scale(self, name: str) -> float:
        """Return a stored number, or 1 if there is none."""
        ...

    def tied(self, embedding: Tensor) -> Linear:
        """Return the head that is tied to the embedding [vocabulary, hidden], which remains in
        use."""
        ...

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        """Return the multiplier of a norm.

        With `from_one` this is 1 + the stored difference, in float32. Otherwise it is the stored
        weight in the model's compute dtype.
        """
        ...

    def tidy(self) -> None:
        """Free the temporary memory of the layer that was just built."""
        ...
