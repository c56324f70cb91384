"""Products of each head's numbers with the head's own matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import device
from kernels.cpu.operators import PANEL, WORD_BYTES, Operators


@dataclass(frozen=True, slots=True, eq=False)
class HeadMatrices:
    """A matrix for each head.

    Attributes:
        weight: [heads, in, out], or with `operators` the panels of each head's [out, in].
    """

    weight: Tensor
    operators: Operators | None = None

    @classmethod
    def of(cls, weights: Tensor) -> "HeadMatrices":
        """Return matrices [heads, in, out]. Shares them where no product is compiled for them."""
        operators = _operators(weights)
        if operators is None:
            return cls(weights)
        panels = [operators.pack_panels(weight.mT) for weight in weights]
        return cls(torch.stack(panels), operators)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, with the padding of panels. 0 where the weights are shared."""
        return 0 if self.operators is None else self.weight.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write the products of x [n, heads, in] into out [n, heads, outputs], any strides but the
        last. With compiled products, no row affects the bits of another."""
        if self.operators is not None:
            self.operators.by_head_product(x, self.weight, out)
        else:
            torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))


def packed_bytes(weights: Tensor) -> int:
    """Return the bytes that `HeadMatrices.of` allocates for such weights on this machine's CPU."""
    heads, inputs, outputs = weights.shape
    padded = -(-outputs // PANEL) * PANEL
    return 0 if _operators(weights) is None else heads * inputs * padded * weights.itemsize


def _operators(weights: Tensor) -> Operators | None:
    if weights.is_cuda:
        return None
    operators = device.compiled_for(torch.device("cpu"))
    if operators is None or not operators.multiplies(weights.dtype):
        return None
    return None if weights.shape[1] * weights.itemsize % WORD_BYTES else operators
