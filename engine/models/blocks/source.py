"""The source from which blocks get their weights while they are built.

A block names each stored tensor once. Names, shapes, byte counts and values are all derived from
that call. Subclasses read a checkpoint, or only record what a decoder needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from engine.models.checkpoint import FLOATS
from engine.models.linear import (
    NO_CUTS,
    Linear,
    Matrix,
    MatrixPart,
    Product,
    Ranges,
    SlottedExperts,
    kept,
)
from engine.models.quantized.experts import ExpertShape
from engine.models.spec import LoadTarget
from engine.ranks import ExpertPart, Share
from kernels.layers.by_head import HeadMatrices


@dataclass(frozen=True, slots=True)
class BlockWeights(ABC):
    """A source of weights. Names are relative to `prefix`.

    Attributes:
        target: the part of the model that is built. Shapes are those of the whole model. Blocks
            request the ranges that belong to the share of the target.
        prefix: prefix that `within` has added.
        products: all products that `linear` has created so far, including those created through
            `within`.
    """

    target: LoadTarget
    prefix: str = field(default="", kw_only=True)
    products: list[Product] = field(default_factory=list, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Device of all tensors from this source."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        return self.target.dtype

    @property
    def share(self) -> Share:
        return self.target.share

    def within(self, prefix: str) -> Self:
        return replace(self, prefix=self.prefix + prefix)

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
        parts = {
            self.prefix + module: MatrixPart.of(count, columns, outputs.get(module), inputs)
            for module, count in rows.items()
        }
        biases = [
            kept(self._stored(f"{module}.bias", (part.rows,)), part.outputs)
            for module, part in parts.items()
            if bias
        ]
        product = Product(self._product(parts, biases if self._adds_bias(inputs) else ()), parts)
        self.products.append(product)
        return product.linear

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        """Return the kept outputs of a module's matrix [rows, columns] in the model's compute
        dtype, for callers that use parts of it. None: all outputs."""
        part = MatrixPart.of(rows, columns, outputs)
        return self._own(self._matrix(self.prefix + module, part).floats())

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
        return self._own(kept(self._stored(self.prefix + name, shape), rows), dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a stored tensor as int64."""
        return self._own(self._stored(self.prefix + name, shape, ("I64",)), torch.int64)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        """Return the multiplier of a norm.

        With `from_one`, it is 1 + the stored difference, in float32. Otherwise it is the stored
        weight in the model's compute dtype.
        """
        stored = self._stored(self.prefix + name, (size,))
        # A small difference would be lost if 1 + difference were rounded to 16 bits.
        return self._own(stored.float() + 1, torch.float32) if from_one else self._own(stored)

    @abstractmethod
    def by_head(self, weights: Tensor) -> HeadMatrices:
        """Return one matrix per head, made of parts of a `matrix`.

        Args:
            weights: [heads, in, out].
        """

    @abstractmethod
    def experts(self, shape: ExpertShape, part: ExpertPart) -> SlottedExperts:
        """Return a part of the experts stored under the module `experts`. If several ranks have
        parts of an expert, only rank 0 has the biases of its outputs."""

    @abstractmethod
    def scale(self, name: str) -> float:
        """Return a stored number, or 1 if the checkpoint lacks it."""

    @abstractmethod
    def tied(self, embedding: Tensor) -> Linear:
        """Return the head that is tied to the embedding [vocabulary, hidden]. The embedding stays
        in use."""

    @abstractmethod
    def tidy(self) -> None:
        """Free the temporary memory of the layer that was just built."""

    @abstractmethod
    def _stored(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        """Return a stored tensor by its full name. It may be mapped from a file."""

    @abstractmethod
    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        """Return a part of a module's matrix. `module`: full name."""

    @abstractmethod
    def _product(self, parts: Mapping[str, MatrixPart], biases: Sequence[Tensor]) -> Linear:
        """Return the product of modules, by full name. `biases`: of each module, or empty."""

    def _own(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy in its own memory, which later changes of the file do not affect."""
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def _adds_bias(self, inputs: range | None) -> bool:
        return inputs is None or self.share.rank == 0
