"""Tensors of one step, from host memory to the device in one copy."""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # for every tensor: kernels are compiled for it, and load 16 bytes at a time


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that `pack` and `upload` need in their destination."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def pack(tensors: Sequence[Tensor], block: NDArray[np.uint8]) -> list[int]:
    """Copy contiguous host tensors into a block, one after the other. Return their first bytes.

    Args:
        block: at least `packed_bytes`.
    """
    starts = []
    start = 0
    for tensor in tensors:
        array = tensor.numpy()  # whose properties are faster than a tensor's
        starts.append(start)
        block[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += _aligned(array.nbytes)
    return starts


def upload(
    tensors: Sequence[Tensor], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy contiguous host tensors to the device on the current stream, without waiting.

    A tensor's address depends only on the sizes of the tensors before it. A graph that was captured
    over `into` therefore finds the next step's tensors at the same addresses.

    Args:
        into: uint8 [any] on the device, at least `packed_bytes`; None: allocate new memory.
    Returns:
        The same tensors on the device; on a CPU, without `into`, the tensors themselves.
    """
    if device.type == "cpu" and into is None:
        return list(tensors)
    num_bytes = packed_bytes(tensors)
    staged = _staged(num_bytes, device)
    starts = pack(tensors, staged.numpy())
    if into is None:
        packed = staged.to(device, non_blocking=True)
    else:
        packed = into[:num_bytes].copy_(staged, non_blocking=True)
    return [
        _view(packed, tensor.dtype, tensor.shape, start)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


class PaddedBlock:
    """Padding for tensors that are uploaded into memory from which captured graphs read.

    Args:
        tensors: in host memory, contiguous, all of them padding.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._packed = np.zeros(packed_bytes(tensors), np.uint8)
        self._starts = pack(tensors, self._packed)

    def upload(
        self, tensors: Sequence[Tensor], others: Sequence[Tensor], into: Tensor
    ) -> list[Tensor]:
        """Copy contiguous host tensors to the device on the current stream, without waiting.

        Args:
            tensors: at most as long as the padding, which follows them.
            others: any number, without padding.
            into: uint8 [any] on the device. If it has no room for `others`, a second copy is made.
        Returns:
            `others` on the device.
        """
        first, device = len(self._packed), into.device
        num_bytes = first + packed_bytes(others)
        fits = num_bytes <= into.nbytes
        staged = _staged(num_bytes if fits else first, device)
        block = staged.numpy()
        block[:first] = self._packed
        for tensor, start in zip(tensors, self._starts, strict=True):
            array = tensor.numpy()
            block[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if not fits:
            into[:first].copy_(staged, non_blocking=True)
            return upload(others, device)
        starts = pack(others, block[first:])
        packed = into[:num_bytes].copy_(staged, non_blocking=True)[first:]
        return [
            _view(packed, tensor.dtype, tensor.shape, start)
            for start, tensor in zip(starts, others, strict=True)
        ]


def _staged(num_bytes: int, device: torch.device) -> Tensor:
    # The pinned-memory allocator reuses a block only when its copy is done.
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _view(packed: Tensor, dtype: torch.dtype, shape: torch.Size, start: int) -> Tensor:
    num_bytes = shape.numel() * dtype.itemsize
    return packed[start : start + num_bytes].view(dtype).view(shape)


def divided(sent: Sequence[Tensor], parts: Iterable[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Split the uploaded tensors into the parts that were uploaded one after the other."""
    rest = iter(sent)
    return [[*islice(rest, len(part))] for part in parts]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
