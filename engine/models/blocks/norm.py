"""RMSNorm with a weight for each column."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.blocks.source import BlockWeights
from kernels.layers.rms_norm import add_rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """The numbers of an RMSNorm.

    Attributes:
        from_one: the stored weight is a difference from 1.
    """

    eps: float
    from_one: bool = False

    def build(self, source: BlockWeights, name: str, size: int) -> "RmsNorm":
        return RmsNorm(source.norm(f"{name}.weight", size, from_one=self.from_one), self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """An RMSNorm.

    Attributes:
        weight: [size], the multiplier. float32 if the stored weight is a difference from 1.
    """

    weight: Tensor
    eps: float

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual), see `add_rms_norm`."""
        return add_rms_norm(x, residual, self.weight, self.eps, rows=rows)
