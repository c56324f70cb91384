"""The interface through which a block requests its weights while it is built.

A block names each stored tensor once. Names, shapes, byte counts and values all derive from that
call.
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
        """The part of the model that is built. Shapes are those of the whole model. Blocks request
        the ranges that this part keeps."""
        ...

    @property
    def products(self) -> Sequence[Product]:
        """The products that `linear` has made so far, including those made through `within`."""
        ...

    @property
    def prefix(self) -> str:
        """Return what `within` has added."""
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
        """Return the matrices of several modules joined along the outputs, optionally with biases.

        Args:
            rows: module -> outputs, of a stored `weight` [outputs, columns] and `bias` [outputs].
            outputs: module -> kept outputs. All outputs of other modules are kept.
            inputs: kept inputs of all modules. The sum of the ranks' products is the whole product,
                so rank 0 alone has the biases. None: every rank has the whole product.
        """
        ...

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        """Return the kept outputs of a module's matrix [rows, columns] in the model's compute
        dtype, for callers that multiply by parts of it. None: all outputs."""
        ...

    def by_head(self, weights: Tensor) -> HeadMatrices:
        """Return a matrix for each head, made of parts of a `matrix`.

        Args:
            weights: [heads, in, out].
        """
        ...

    def experts(self, shape: ExpertShape, part: ExpertPart) -> SlottedExperts:
        """Return a part of the experts stored under the module `experts`. Of experts that several
        ranks have, rank 0 alone has the biases of the outputs."""
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
