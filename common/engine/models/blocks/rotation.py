"""Rotary position embedding of a layer: frequencies, and the angles of a step's tokens.

Which frequencies a configuration means is read elsewhere (`rope.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layers.rope import rope_angles


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies: [head_dim / 2]; scale multiplies cosines and sines."""

    inverse_frequencies: tuple[float, ...]
    scale: float

    def build(self, device: torch.device) -> "Rotation":
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        return Rotation(frequencies, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The same object for all layers that rotate alike."""

    inverse_frequencies: Tensor
    scale: float

    def angles(self, positions: Tensor) -> Tensor:
        """float32 [2, num_tokens, head_dim / 2]: cosines, sines."""
        return rope_angles(positions, self.inverse_frequencies, self.scale)
