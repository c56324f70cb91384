"""Upload of the columns of one step from host memory to the device, in one copy."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, cycle, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostColumn: TypeAlias = NDArray[Any]  # contiguous, of one of these dtypes
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}
_ALIGNMENT = 16  # bytes: kernels are compiled for this alignment, and load 16 bytes at a time
_GAP = bytes(_ALIGNMENT)
_NUM_PINNED = 4  # the engine has at most two steps in flight
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


class InputBlock:
    """A block of device memory into which the inputs of every step are copied.

    A copy is asynchronous, so each step is packed into the next of several pinned blocks. A pinned
    block is written again only after its own copy is done.

    Attributes:
        memory: uint8 [any], on the device.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pinned = cycle([_PinnedBlock(self.memory) for _ in range(_NUM_PINNED)])

    def send(self, packed: bytes) -> None:
        """Copy to the start of the block, on the current stream, without waiting for the copy. The
        bytes after it may change, too."""
        next(self._pinned).send(packed)


class _PinnedBlock:
    """Pinned memory for one copy at a time to the start of `target`. It grows as needed."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        on_device = target.device.type != "cpu"
        self._copied = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]
        self._allocate(0)

    def _allocate(self, num_bytes: int) -> None:
        self._source = _staged(num_bytes, self._target.device)
        self._memory = self._source.numpy().data
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}  # target and source by size

    def send(self, packed: bytes) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # done, unless the host is _NUM_PINNED steps ahead
        num_bytes = len(packed)
        if num_bytes > len(self._memory):
            self._allocate(min(2 * num_bytes, len(self._target)))
        self._memory[:num_bytes] = packed
        target, source = self._parts(num_bytes)
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _parts(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return the target and the source of a copy of at least `num_bytes`, by at most an eighth
        or 1 KiB more. So there are few of them, and each is made once."""
        step = 1 << max(10, num_bytes.bit_length() - 4)
        end = -(-num_bytes // step) * step
        parts = self._ends.get(end)
        if parts is None:
            room = min(end, len(self._memory))
            parts = self._ends[end] = self._target[:room], self._source[:room]
        return parts


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

    def upload(
        self, columns: Sequence[HostColumn], others: Sequence[HostColumn], into: InputBlock
    ) -> list[Tensor]:
        """Copy columns to the device on the current stream, without waiting.

        Args:
            columns: at most as long as the padding, which fills the rest.
            others: columns without padding.
            into: if it is too small for `others`, a second copy is made.
        Returns:
            `others` on the device.
        """
        memory, first = into.memory, self._num_bytes
        fits = first + packed_bytes(others) <= len(memory)
        self.send(columns, others if fits else (), into)
        if not fits:
            return upload(others, memory.device)
        starts = accumulate((_aligned(column.nbytes) for column in others), initial=first)
        return [_view(memory, column, start) for start, column in zip(starts, others, strict=False)]

    def send(
        self, columns: Sequence[HostColumn], others: Sequence[HostColumn], into: InputBlock
    ) -> None:
        """Copy the same columns without returning views. `into` must be large enough for
        `others`."""
        parts: list[Any] = []
        for column, padding in zip(columns, self._paddings, strict=True):
            if column is ONLY_PADDING:
                parts.append(padding)
            else:
                parts += column, padding[column.nbytes :]
        for column in others:
            parts += column, _GAP[: -column.nbytes % _ALIGNMENT]
        into.send(b"".join(parts))  # the fastest way in Python to copy many arrays


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
