"""Random weights for a decoder's blocks, generated on the device that needs them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.models.linear import NO_CUTS, Linear, Product, Ranges
from engine.models.linear.dense import DenseLinear
from engine.models.linear.experts import StackedLinear
from engine.models.quantized.experts import ExpertShape
from engine.ranks import WHOLE, ExpertPart, Share
from kernels.experts.grouped_mlp import ExpertMatrices
from kernels.layers.by_head import HeadMatrices


@dataclass(slots=True)
class Made:
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A source of weights that keep the size of activations from layer to layer, for whole models.

    drawn: dtype to which they are rounded. held: dtype in which they are stored.
    """

    device: torch.device
    drawn: torch.dtype
    held: torch.dtype
    made: Made = field(default_factory=Made)

    @property
    def dtype(self) -> torch.dtype:
        return self.held

    @property
    def share(self) -> Share:
        return WHOLE

    @property
    def products(self) -> Sequence[Product]:
        return ()

    @property
    def prefix(self) -> str:
        return ""

    def within(self, prefix: str) -> "RandomWeights":
        return self

    def linear(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        bias: bool = False,
        outputs: Mapping[str, Ranges] = NO_CUTS,
        inputs: range | None = None,
    ) -> Linear:
        count = sum(rows.values())
        added = self._draw((count,), 0.0, 0.1) if bias else None
        return DenseLinear(self._draw((count, columns), 0.0, columns**-0.5), added)

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        return self._draw((rows, columns), 0.0, columns**-0.5)

    def by_head(self, weights: Tensor) -> HeadMatrices:
        return HeadMatrices.of(weights)

    def experts(self, shape: ExpertShape, part: ExpertPart) -> StackedLinear:
        count, hidden, inner = len(part.experts), shape.hidden, part.inner
        return StackedLinear(
            shape.gate,
            ExpertMatrices(self._draw((count, 2 * len(inner), hidden), 0.0, hidden**-0.5)),
            ExpertMatrices(self._draw((count, hidden, len(inner)), 0.0, len(inner) ** -0.5)),
        )

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
    ) -> Tensor:
        return self._draw(shape, 0.0, 1.0).to(dtype or self.held)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def scale(self, name: str) -> float:
        return 1.0

    def tied(self, embedding: Tensor) -> Linear:
        return DenseLinear(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        return self._draw((size,), 1.0, 0.1)

    def tidy(self) -> None:
        pass

    def _draw(self, shape: tuple[int, ...], mean: float, deviation: float) -> Tensor:
        drawn = torch.empty(shape, dtype=self.drawn, device=self.device).normal_(mean, deviation)
        self.made.num_bytes += math.prod(shape) * self.held.itemsize
        return drawn.to(self.held)
