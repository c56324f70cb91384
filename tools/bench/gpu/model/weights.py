"""Random weights for a decoder's blocks, generated on the device that needs them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.models.blocks.source import BlockWeights
from engine.models.checkpoint import FLOATS
from engine.models.linear import Linear, Matrix, MatrixPart
from engine.models.linear.dense import DenseLinear
from engine.models.linear.experts import StackedLinear
from engine.models.quantized.experts import ExpertShape
from engine.ranks import ExpertPart
from kernels.experts.grouped_mlp import ExpertMatrices
from kernels.layers.by_head import HeadMatrices


@dataclass(slots=True)
class Made:
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights(BlockWeights):
    """A source of weights that keep the size of activations from layer to layer, for whole models.

    Attributes:
        dtype: dtype in which they are stored.
        drawn: dtype to which they are rounded.
    """

    drawn: torch.dtype
    made: Made = field(default_factory=Made)

    def by_head(self, weights: Tensor) -> HeadMatrices:
        return HeadMatrices.of(weights)

    def experts(self, shape: ExpertShape, part: ExpertPart) -> StackedLinear:
        count, hidden, inner = len(part.experts), shape.hidden, part.inner
        return StackedLinear(
            shape.gate,
            ExpertMatrices(self._draw((count, 2 * len(inner), hidden), 0.0, hidden**-0.5)),
            ExpertMatrices(self._draw((count, hidden, len(inner)), 0.0, len(inner) ** -0.5)),
        )

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def scale(self, name: str) -> float:
        return 1.0

    def tied(self, embedding: Tensor) -> Linear:
        return DenseLinear(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        return self._draw((size,), 1.0, 0.1)

    def tidy(self) -> None:
        """Do nothing, because drawing needs little temporary memory."""

    def _stored(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        return self._draw(shape, 0.0, 0.1 if name.endswith(".bias") else 1.0)

    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        return Matrix(self._draw((part.rows, part.columns), 0.0, part.columns**-0.5))

    def _product(self, parts: Mapping[str, MatrixPart], biases: Sequence[Tensor]) -> Linear:
        count = sum(part.rows for part in parts.values())
        columns = next(iter(parts.values())).columns
        bias = self._own(torch.cat([*biases])) if biases else None
        return DenseLinear(self._draw((count, columns), 0.0, columns**-0.5), bias)

    def _own(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(dtype or self.dtype)

    def _draw(self, shape: tuple[int, ...], mean: float, deviation: float) -> Tensor:
        drawn = torch.empty(shape, dtype=self.drawn, device=self.device).normal_(mean, deviation)
        self.made.num_bytes += math.prod(shape) * self.dtype.itemsize
        return drawn.to(self.dtype)
