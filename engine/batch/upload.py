"""Upload of the columns of one step from host memory to the device, in one copy."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostColumn: TypeAlias = NDArray[Any]  # contiguous, of one of these dtypes
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}
_ALIGNMENT = 16  # bytes: kernels are compiled for this alignment, and load 16 bytes at a time
_GAP = bytes(_ALIGNMENT)
ONLY_PADDING: HostColumn = np.empty(0)  # stands for a missing column in PaddedBlock


def packed_bytes(columns: Sequence[HostColumn]) -> int:
    """Return the bytes that `pack` and `upload` need at their destination."""
    return sum(_aligned(column.nbytes) for column in columns)


def pack(columns: Sequence[HostColumn], block: NDArray[np.uint8]) -> list[int]:
    """Copy columns into a block, one after the other. Return the offset of each in bytes.

    Args:
        block: at least `packed_bytes` long.
    """
    starts = []
    start = 0
    for column in columns:
        starts.append(start)
        block[start : start + column.nbytes] = column.reshape(-1).view(np.uint8)
        start += _aligned(column.nbytes)
    return starts


def upload(
    columns: Sequence[HostColumn], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy columns to the device on the current stream, without waiting.

    A tensor's address depends only on the sizes of the columns before it. A graph captured with
    `into` therefore finds the next step's tensors at the same addresses.

    Args:
        into: uint8 [any] on the device, at least `packed_bytes` long. None: allocate new memory.
    Returns:
        The columns on the device. On a CPU without `into`, tensors over the columns' own memory.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(column) for column in columns]
    num_bytes = packed_bytes(columns)
    staged = _staged(num_bytes, device)
    starts = pack(columns, staged.numpy())
    if into is None:
        packed = staged.to(device, non_blocking=True)
    else:
        packed = into[:num_bytes].copy_(staged, non_blocking=True)
    return [_view(packed, column, start) for start, column in zip(starts, columns, strict=True)]


class PaddedBlock:
    """Padding of columns that are uploaded into the memory from which captured graphs read.

    Args:
        columns: all their values are padding.
    """

    def __init__(self, columns: Sequence[HostColumn]) -> None:
        packed = np.zeros(packed_bytes(columns), np.uint8)
        starts = [*pack(columns, packed), len(packed)]
        padding = memoryview(packed.tobytes())
        self._paddings = [padding[start:end] for start, end in pairwise(starts)]
        self._num_bytes = len(packed)
        self.num_columns = len(columns)

    def upload(
        self, columns: Sequence[HostColumn], others: Sequence[HostColumn], into: Tensor
    ) -> list[Tensor]:
        """Copy columns to the device on the current stream, without waiting.

        Args:
            columns: at most as long as the padding, which fills the rest.
            others: columns without padding.
            into: uint8 [any] on the device. If it is too small for `others`, a second copy is made.
        Returns:
            `others` on the device.
        """
        first, fits = self._num_bytes, self._num_bytes + packed_bytes(others) <= into.nbytes
        self.send(columns, others if fits else (), into)
        if not fits:
            return upload(others, into.device)
        starts = accumulate((_aligned(column.nbytes) for column in others), initial=first)
        return [_view(into, column, start) for start, column in zip(starts, others, strict=False)]

    def send(
        self, columns: Sequence[HostColumn], others: Sequence[HostColumn], into: Tensor
    ) -> None:
        """Copy the same columns without returning views. `into` must be large enough for
        `others`."""
        parts: list[Any] = []
        for column, padding in zip(columns, self._paddings, strict=True):
            parts += column, padding[column.nbytes :]
        for column in others:
            parts += column, _GAP[: -column.nbytes % _ALIGNMENT]
        packed = b"".join(parts)  # the fastest way in Python to copy many arrays
        staged = _staged(len(packed), into.device)
        staged.numpy()[:] = np.frombuffer(packed, np.uint8)
        into[: len(packed)].copy_(staged, non_blocking=True)


def _staged(num_bytes: int, device: torch.device) -> Tensor:
    # The pinned-memory allocator reuses a block only after its copy is done.
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _view(packed: Tensor, column: HostColumn, start: int) -> Tensor:
    view = packed[start : start + column.nbytes].view(_DTYPES[column.dtype])
    return view if column.ndim == 1 else view.view(column.shape)


def divided(
    sent: Sequence[Tensor], parts: Iterable[Sequence[HostColumn]]
) -> list[Sequence[Tensor]]:
    """Split the uploaded tensors into the parts that were uploaded together."""
    rest = iter(sent)
    return [[*islice(rest, len(part))] for part in parts]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
