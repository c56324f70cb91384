"""Rotary position embedding (RoPE) of a layer: frequencies, and the angles of a step's tokens.

`rope.py` reads the frequencies from a configuration.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layers.rope import rope_angles


@dataclass(frozen=True, slots=True)
class Rope:
    """The numbers of a rotary position embedding.

    Attributes:
        inverse_frequencies: [head_dim / 2].
        scale: factor of cosines and sines.
    """

    inverse_frequencies: tuple[float, ...]
    scale: float

    def build(self, device: torch.device) -> "Rotation":
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        return Rotation(frequencies, self.scale)


@dataclass(frozen=True, slots=True)
class AxialRope(Rope):
    """A rotation by three positions: time, height and width. They differ only for image tokens.

    Attributes:
        axes: the axis whose position rotates each pair of a head: 0 for time, 1 for height, 2 for
            width.

    Source: Qwen2-VL, Wang et al. 2024, section 2.1 (M-RoPE).
    """

    axes: tuple[int, ...]

    def build(self, device: torch.device) -> "Rotation":
        plain = super(AxialRope, self).build(device)
        by_pair = torch.tensor(self.axes, device=device)
        return AxialRotation(plain.inverse_frequencies, plain.scale, by_pair)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A rotation on the device. Layers with the same rotation share one object."""

    inverse_frequencies: Tensor
    scale: float

    def angles(self, positions: Tensor) -> Tensor:
        """Return cosines and sines, float32 [2, num_tokens, head_dim / 2].

        Args:
            positions: int32 [num_tokens].
        """
        return rope_angles(positions, self.inverse_frequencies, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class AxialRotation(Rotation):
    """A rotation by three positions.

    Attributes:
        axes: int64 [head_dim / 2], the axis whose position rotates each pair.
    """

    axes: Tensor

    def angles(self, positions: Tensor) -> Tensor:
        """Return cosines and sines, float32 [2, num_tokens, head_dim / 2].

        Args:
            positions: int32 [num_tokens], or [3, num_tokens] where the axes differ.
        """
        if positions.ndim == 1:
            return rope_angles(positions, self.inverse_frequencies, self.scale)
        turns = positions.index_select(0, self.axes).T.float() * self.inverse_frequencies
        return torch.stack((turns.cos(), turns.sin())).mul_(self.scale)
