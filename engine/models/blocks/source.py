"""What a block asks for its weights while it is built.

A block names each stored tensor once, here; names, shapes, bytes and values all come of it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.linear import ExpertNet, Linear, Product
from engine.models.quantized.experts import ExpertShape


class Source(Protocol):
    """Names are relative to what `within` has added to them."""

    @property
    def device(self) -> torch.device:
        """Of all tensors that it gives."""
        ...

    @property
    def products(self) -> Sequence[Product]:
        """What `linear` has made until now, here and within."""
        ...

    def within(self, prefix: str) -> "Source": ...

    def linear(self, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> Linear:
        """The matrices, and perhaps biases, of modules as one, output after output.

        Args:
            rows: module -> outputs, of a stored `weight` [outputs, columns] and `bias` [outputs].
        """
        ...

    def matrix(self, module: str, rows: int, columns: int) -> Tensor:
        """A module's matrix, [rows, columns] in the dtype that the model computes in, for who
        multiplies by parts of it."""
        ...

    def experts(self, shape: ExpertShape) -> ExpertNet:
        """Those stored under the module `experts`."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """
        Args:
            dtype: that it is held in; None: the one that the model computes in.
        """
        ...

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """int64, as they are stored."""
        ...

    def scale(self, name: str) -> float:
        """A stored number; 1 where there is none."""
        ...

    def tied(self, embedding: Tensor) -> Linear:
        """The head that is the embedding [vocabulary, hidden], which lives on beside it."""
        ...

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        """What a norm multiplies by: 1 + the stored difference, in float32, with `from_one`; else
        what is stored, in the dtype that the model computes in."""
        ...

    def tidy(self) -> None:
        """A layer is whole: what making it has left over may go."""
        ...
