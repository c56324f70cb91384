"""The interface through which a block gets its weights while it is built.

A block names each stored tensor once. Names, shapes, byte counts and values are all derived from
that call.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.linear import NO_CUTS, Linear, Product, Ranges, SlottedExperts
from engine.models.quantized.experts import ExpertShape
from engine.ranks import ExpertPart, Share
from kernels.layers.by_head import HeadMatrices


class BlockWeights(Protocol):
    """A source of weights. Names are relative to the prefix that `within` has added."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors from this source."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        ...

    @property
    def share(self) -> Share:
        """The share of the model that is built. Shapes are those of the whole model. Blocks request
        the ranges that belong to this share."""
        ...

    @property
    def products(self) -> Sequence[Product]:
        """All products that `linear` has created so far, including those created through
        `within`."""
        ...

    @property
    def prefix(self) -> str:
        """Return the prefix that `within` has added."""
        ...

    def within(self, prefix: str) -> "BlockWeights": ...

    def linear(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        bias: bool = False,
        outputs: Mapping[str, Ranges] = NO_CUTS,
        inputs: range | None = None,
    ) -> Linear:
        """Return the matrices of several modules, concatenated along the outputs, optionally with
        biases.

        Args:
            rows: module -> outputs, of a stored `weight` [outputs, columns] and `bias` [outputs].
            outputs: module -> kept outputs. Other modules keep all outputs.
            inputs: kept inputs of all modules. The whole product is then the sum of the ranks'
                products, so only rank 0 has the biases. None: every rank has the whole product.
        """
        ...

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        """Return the kept outputs of a module's matrix [rows, columns] in the model's compute
        dtype, for callers that use parts of it. None: all outputs."""
        ...

    def by_head(self, weights: Tensor) -> HeadMatrices:
        """Return one matrix per head, made of parts of a `matrix`.

        Args:
            weights: [heads, in, out].
        """
        ...

    def experts(self, shape: ExpertShape, part: ExpertPart) -> SlottedExperts:
        """Return a part of the experts stored under the module `experts`. If several ranks have
        parts of an expert, only rank 0 has the biases of its outputs."""
        ...

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
    ) -> Tensor:
        """Return a stored tensor.

        Args:
            rows: kept part of the first dimension. None: everything.
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
        """Return the head that is tied to the embedding [vocabulary, hidden]. The embedding stays
        in use."""
        ...

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        """Return the multiplier of a norm.

        With `from_one`, it is 1 + the stored difference, in float32. Otherwise it is the stored
        weight in the model's compute dtype.
        """
        ...

    def tidy(self) -> None:
        """Free the temporary memory of the layer that was just built."""
        ...
