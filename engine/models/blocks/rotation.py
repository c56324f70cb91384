"""Rotary position embedding of a layer: frequencies, and the angles of a step's tokens.

Which frequencies a configuration means is read elsewhere (`rope.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.images import AXES
from kernels.layers.rope import rope_angles


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies: [head_dim / 2]; scale multiplies cosines and sines."""

    inverse_frequencies: tuple[float, ...]
    scale: float

    def build(self, device: torch.device) -> "Rotation":
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        return Rotation(frequencies, self.scale)


@dataclass(frozen=True, slots=True)
class AxialRope(Rope):
    """sections: numbers of a head's half that turn by time, by height, by width, and again from
    the first; they are the same position for all tokens but those of images.

    Source: Qwen2-VL, Wang et al. 2024, section 2.1 (M-RoPE).
    """

    sections: tuple[int, ...]

    def build(self, device: torch.device) -> "Rotation":
        plain = super(AxialRope, self).build(device)
        axes = torch.arange(len(self.sections)) % AXES
        sizes = torch.tensor(self.sections)
        by_pair = torch.repeat_interleave(axes, sizes).to(device)
        return AxialRotation(plain.inverse_frequencies, plain.scale, by_pair)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The same object for all layers that rotate alike."""

    inverse_frequencies: Tensor
    scale: float

    def angles(self, positions: Tensor) -> Tensor:
        """float32 [2, num_tokens, head_dim / 2]: cosines, sines.

        Args:
            positions: int32 [num_tokens].
        """
        return rope_angles(positions, self.inverse_frequencies, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class AxialRotation(Rotation):
    """axes: int64 [head_dim / 2], the one by whose position each pair turns."""

    axes: Tensor

    def angles(self, positions: Tensor) -> Tensor:
        """
        Args:
            positions: int32 [num_tokens], or [3, num_tokens] where the axes' differ.
        """
        if positions.ndim == 1:
            return rope_angles(positions, self.inverse_frequencies, self.scale)
        turns = positions.index_select(0, self.axes).T.float() * self.inverse_frequencies
        return torch.stack((turns.cos(), turns.sin())).mul_(self.scale)
