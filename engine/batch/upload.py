"""Upload of the tensors of one step from host memory to the device, in one copy."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes: kernels are compiled for this alignment, and load 16 bytes at a time
_GAP = bytes(_ALIGNMENT)
ONLY_PADDING = torch.empty(0)  # stands for a missing tensor in PaddedBlock


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that `pack` and `upload` need at their destination."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def pack(tensors: Sequence[Tensor], block: NDArray[np.uint8]) -> list[int]:
    """Copy contiguous host tensors into a block, one after the other. Return the offset of each in
    bytes.

    Args:
        block: at least `packed_bytes` long.
    """
    starts = []
    start = 0
    for tensor in tensors:
        array = tensor.numpy()  # numpy properties are faster than those of a tensor
        starts.append(start)
        block[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += _aligned(array.nbytes)
    return starts


def upload(
    tensors: Sequence[Tensor], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy contiguous host tensors to the device on the current stream, without waiting.

    A tensor's address depends only on the sizes of the tensors before it. A graph captured with
    `into` therefore finds the next step's tensors at the same addresses.

    Args:
        into: uint8 [any] on the device, at least `packed_bytes` long. None: allocate new memory.
    Returns:
        The same tensors on the device. On a CPU without `into`, the tensors themselves.
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
    """Padding of tensors that are uploaded into the memory from which captured graphs read.

    Args:
        tensors: in host memory, contiguous. All their values are padding.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        packed = np.zeros(packed_bytes(tensors), np.uint8)
        starts = [*pack(tensors, packed), len(packed)]
        padding = memoryview(packed.tobytes())
        self._paddings = [padding[start:end] for start, end in pairwise(starts)]
        self._num_bytes = len(packed)
        self.num_tensors = len(tensors)

    def upload(
        self, tensors: Sequence[Tensor], others: Sequence[Tensor], into: Tensor
    ) -> list[Tensor]:
        """Copy contiguous host tensors to the device on the current stream, without waiting.

        Args:
            tensors: at most as long as the padding, which fills the rest.
            others: tensors without padding.
            into: uint8 [any] on the device. If it is too small for `others`, a second copy is made.
        Returns:
            `others` on the device.
        """
        first, fits = self._num_bytes, self._num_bytes + packed_bytes(others) <= into.nbytes
        self.send(tensors, others if fits else (), into)
        if not fits:
            return upload(others, into.device)
        starts = accumulate((_aligned(tensor.nbytes) for tensor in others), initial=first)
        return [
            _view(into, tensor.dtype, tensor.shape, start)
            for start, tensor in zip(starts, others, strict=False)
        ]

    def send(self, tensors: Sequence[Tensor], others: Sequence[Tensor], into: Tensor) -> None:
        """Copy the same tensors without returning views. `into` must be large enough for
        `others`."""
        parts: list[Any] = []
        for tensor, padding in zip(tensors, self._paddings, strict=True):
            if tensor is ONLY_PADDING:
                parts.append(padding)
            else:
                array = tensor.numpy()
                parts += array, padding[array.nbytes :]
        for tensor in others:
            array = tensor.numpy()
            parts += array, _GAP[: -array.nbytes % _ALIGNMENT]
        packed = b"".join(parts)  # the fastest way in Python to copy many arrays
        staged = _staged(len(packed), into.device)
        staged.numpy()[:] = np.frombuffer(packed, np.uint8)
        into[: len(packed)].copy_(staged, non_blocking=True)


def _staged(num_bytes: int, device: torch.device) -> Tensor:
    # The pinned-memory allocator reuses a block only after its copy is done.
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _view(packed: Tensor, dtype: torch.dtype, shape: torch.Size, start: int) -> Tensor:
    num_bytes = shape.numel() * dtype.itemsize
    return packed[start : start + num_bytes].view(dtype).view(shape)


def divided(sent: Sequence[Tensor], parts: Iterable[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Split the uploaded tensors into the parts that were uploaded together."""
    rest = iter(sent)
    return [[*islice(rest, len(part))] for part in parts]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
