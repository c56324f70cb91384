"""The memory of a model's weights."""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from engine.models.blocks.rotation import Rotation
from engine.models.linear.panels import CodePanels
from kernels.cpu.layers import PanelMatrix
from kernels.layers.by_head import HeadMatrices


def nbytes(part: Any) -> int:
    """Return the bytes of all weights in a block, or in a sequence of blocks, with biases.

    The padding of panels does not count. Frequencies are not weights.
    """
    match part:
        case Tensor() | HeadMatrices():
            return part.nbytes
        case tuple() | list():
            return sum(map(nbytes, part))
        case Rotation():
            return 0
        case CodePanels():
            return part.format.num_bytes(part.outputs, part.inputs) + nbytes(part.bias)
        case PanelMatrix():
            numbers = part.outputs * part.inputs * part.panels.itemsize
            return numbers + nbytes((part.scales, part.zeros, part.bias))
    if not is_dataclass(part):
        return 0
    return sum(nbytes(getattr(part, field.name)) for field in fields(part))
