"""Small unsigned integers packed into 32-bit words, lowest bits first, and conversion to floats.

GPTQ, AWQ and compressed-tensors share the formula (number - zero) * scale, by groups of inputs.
"""

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.linear import Matrix
from kernels.quantised import QuantFormat

BITS = (4, 8)  # sizes that do not cross bytes


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, m] to uint8 [n, m * 32 / bits]."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).view(words.shape[0], -1)


def floats(numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor | None) -> Tensor:
    """Return (number - zero) * scale.

    Args:
        numbers: [out, in].
        scale, zero: [out, groups].
        groups: [in], the group of each input. None: consecutive groups of equal size.
    Returns:
        float32 [out, in].
    """
    rows, num_groups = scale.shape
    if groups is None:
        grouped = numbers.reshape(rows, num_groups, -1).float()
        grouped.sub_(zero.float().unsqueeze(-1)).mul_(scale.float().unsqueeze(-1))
        return grouped.view(rows, -1)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ConfigError(f"an input belongs to a group outside [0, {num_groups})")
    wide = numbers.float().sub_(zero.float()[:, groups.long()])
    return wide.mul_(scale.float()[:, groups.long()])


def as_stored(
    numbers: Tensor, scale: Tensor, zero: Tensor, form: QuantFormat | None, groups: Tensor | None
) -> Matrix:
    """Return integers as they are if a format is given, otherwise as floats.

    Args:
        numbers: uint8 [out, in].
        scale, zero: [out, groups].
        groups: [in], the group of each input. None: consecutive groups of equal size.
    """
    order, columns = torch.empty(0), numbers.shape[1]
    if form is not None and form.reordered:
        groups = torch.arange(columns) // (form.group or columns) if groups is None else groups
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order].long(), torch.arange(columns) // (form.group or columns)):
            form = None
    elif groups is not None:
        form = None
    if form is None:
        return Matrix(floats(numbers, scale, zero, groups))
    numbers = numbers[:, order] if form.reordered else numbers
    zeros = zero.to(torch.uint8).contiguous()
    return Matrix(numbers, form, scale.float().contiguous(), zeros, order)


def group_size(size: int, columns: int, module: str) -> int:
    """Return the number of inputs per group. A size of -1 means one group of all inputs.

    Raises:
        ConfigError: the number of inputs is not a multiple of the group size.
    """
    if size == -1:
        return columns
    if columns % size:
        raise ConfigError(f"{module}: {columns} inputs do not divide into groups of {size}")
    return size
