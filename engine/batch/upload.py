"""Tensors of one step, from host memory to the device in one copy."""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # of every tensor: kernels are compiled for it, and load 16 bytes at a time


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """What `upload` needs of its destination."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def upload(
    tensors: Sequence[Tensor], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copies tensors of host memory, contiguous ones, on the current stream and without waiting.

    Where a tensor comes to lie depends only on the sizes of those before it, so that a graph which
    was captured over `into` finds the next step's tensors in the same places.

    Args:
        into: uint8 [any] on the device, at least `packed_bytes`; None: memory of its own.
    Returns:
        The same tensors on the device; on a CPU, without `into`, the tensors themselves.
    """
    if device.type == "cpu" and into is None:
        return list(tensors)
    num_bytes = packed_bytes(tensors)
    # The allocator of pinned memory gives a block away again only when the copy is done.
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staged.numpy()
    starts = []
    start = 0
    for tensor in tensors:
        starts.append(start)
        host[start : start + tensor.nbytes] = tensor.numpy().reshape(-1).view(np.uint8)
        start += _aligned(tensor.nbytes)
    if into is None:
        packed = staged.to(device, non_blocking=True)
    else:
        packed = into[:num_bytes].copy_(staged, non_blocking=True)
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def divided(sent: Sequence[Tensor], parts: Iterable[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """What was uploaded of each of these, which were uploaded one after the other."""
    rest = iter(sent)
    return [[*islice(rest, len(part))] for part in parts]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
