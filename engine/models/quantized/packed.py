"""Small unsigned integers packed into words of 32 bits, lowest first, and what they stand for.

What GPTQ, AWQ and compressed-tensors have in common: (number - zero) * scale, by groups of inputs.
"""

import torch
from torch import Tensor

from common.errors import ConfigError

BITS = (4, 8)  # that do not straddle bytes


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).view(words.shape[0], -1)


def floats(numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor | None) -> Tensor:
    """(number - zero) * scale.

    Args:
        numbers: [out, in].
        scale, zero: [out, groups].
        groups: [in], the group of each input; None: as many inputs to each, one after the other.
    Returns:
        float32 [out, in].
    """
    rows, num_groups = scale.shape
    if groups is None:
        grouped = numbers.reshape(rows, num_groups, -1).float()
        grouped.sub_(zero.float().unsqueeze(-1)).mul_(scale.float().unsqueeze(-1))
        return grouped.view(rows, -1)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ConfigError(f"an input belongs to a group that is none of the {num_groups} there are")
    wide = numbers.float().sub_(zero.float()[:, groups.long()])
    return wide.mul_(scale.float()[:, groups.long()])


def group_size(size: int, columns: int, module: str) -> int:
    """-1: all inputs are one group.

    Raises:
        ConfigError: inputs do not divide into groups.
    """
    if size == -1:
        return columns
    if columns % size:
        raise ConfigError(f"{module}: {columns} inputs do not divide into groups of {size}")
    return size
