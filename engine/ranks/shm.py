"""Collectives in shared memory, for ranks on one CPU host.

Each rank has a counter and two buffers, which alternate. In call number n, a rank writes its part
into buffer n % 2 and sets its counter to n. It reads the part of another rank once that rank's
counter is at least n. Call n + 2 reuses the buffer. Its writer first waits until all counters are
at least n + 1. A rank that has begun call n + 1 has read all parts of call n.

A waiting rank yields its core for a moment and then sleeps on the counter (futex).
"""

import ctypes
import math
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import RankLost

BUFFER_BYTES = 1 << 20  # larger tensors are sent in pieces
_LINE = 64  # bytes of a cache line. Each counter has its own line.
_YIELD_S = 100e-6
_SLEEP_S = 0.02  # seconds between two checks of the other processes
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_SLEEP = _Timespec(0, int(_SLEEP_S * 1e9))


def memory_bytes(size: int) -> int:
    """Return the bytes of the file that `size` ranks share."""
    return size * (2 * _LINE + 2 * BUFFER_BYTES)


def new_memory(name: str, num_bytes: int) -> int:
    """Return the descriptor of new memory with zeros. Only pages that are written take physical
    memory."""
    memory = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(memory, num_bytes)
    return memory


class SharedMemoryGroup:
    """A Group of ranks that share a file.

    Args:
        rank: number of this rank in the group.
        ranks: ranks of the node that are in this group.
        memory: descriptor of a file with `memory_bytes` zeros, for example a memfd.
        others: pidfds of the other `ranks`. Owned by the group.
        timeout_s: longest wait for another rank.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        memory: int,
        others: Mapping[int, int],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size = len(ranks)
        self._ranks = ranks
        self._others = others
        self._timeout_s = timeout_s
        self._map = mmap.mmap(memory, memory_bytes(size))
        whole: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        lines = whole[: size * 2 * _LINE].view(np.int64).reshape(size, 2, _LINE // 8)
        self._counters, self._sleepers = lines[:, 0, 0], lines[:, 1, 0]
        self._addresses = [self._counters[each:].ctypes.data for each in range(size)]
        self._buffers = whole[size * 2 * _LINE :].reshape(2, size, BUFFER_BYTES)
        self._number = 0
        self._ended = select.poll()
        for pidfd in others.values():
            self._ended.register(pidfd, select.POLLIN)
        self._lock = threading.Lock()
        self._lock.acquire()

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._in_pieces(x, self._sum)

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        return self._in_pieces(x, lambda piece: self._exchange(piece, (sender,))[0].clone())

    def all_gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, x.numel())
        for piece, begin in _pieces(x.view(-1)):
            for rank, part in enumerate(self._exchange(piece, range(self.size))):
                whole[rank, begin : begin + len(piece)] = part
        return torch.cat([*whole.view(self.size, *x.shape)], dim=-1)

    def close(self) -> None:
        for pidfd in self._others.values():
            os.close(pidfd)

    def _in_pieces(self, x: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        flat = x.view(-1)
        if flat.nbytes <= BUFFER_BYTES:
            return combine(flat).view(x.shape)
        return torch.cat([combine(piece) for piece, _ in _pieces(flat)]).view(x.shape)

    def _sum(self, x: Tensor) -> Tensor:
        """Add in rank order, 16-bit numbers in float32."""
        parts = self._exchange(x, range(self.size))
        total = parts[0].to(torch.float32 if x.dtype.itemsize == 2 else x.dtype, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def _exchange(self, x: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Make a whole call, see `publish` and `collect`."""
        self.publish(x, ranks)
        return self.collect(x, ranks)

    @property
    def is_awaited(self) -> bool:
        """Return whether another rank has begun a call that this rank has not begun."""
        return bool((self._counters > self._number).any())

    def publish(self, x: Tensor, ranks: Sequence[int]) -> None:
        """Begin a call: write this rank's part if it is one of `ranks`, and signal the other
        ranks."""
        number = self._number = self._number + 1
        buffers = self._buffers[number % 2, :, : x.nbytes]
        if self.rank in ranks:
            for rank in range(self.size):
                self._wait_for(rank, number - 1)
            buffers[self.rank] = x.view(torch.uint8).numpy()
        self._fence()
        self._counters[self.rank] = number
        self._fence()
        if self._sleepers[self.rank]:
            self._sleepers[self.rank] = 0
            _futex(self._addresses[self.rank], _FUTEX_WAKE, 0x7FFFFFFF, None)

    def collect(self, x: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """End a call. Return the parts of `ranks`, as views that are valid until the next call.

        Args:
            x: see `publish`.
        """
        for rank in ranks:
            self._wait_for(rank, self._number)
        self._fence()
        buffers = self._buffers[self._number % 2, :, : x.nbytes]
        return [torch.from_numpy(buffers[rank]).view(x.dtype) for rank in ranks]

    def _wait_for(self, rank: int, number: int) -> None:
        """Wait until a rank's counter is at least `number`."""
        if self._counters[rank] >= number:
            return
        began = time.monotonic()
        while self._counters[rank] < number:
            waited = time.monotonic() - began
            if waited < _YIELD_S:
                # Releases the GIL in every Python version, unlike os.sched_yield.
                _libc.sched_yield()
                continue
            self._sleepers[rank] = 1
            self._fence()
            seen = int(self._counters[rank])
            if seen < number:
                low = seen & 0xFFFFFFFF  # a futex is the lower half of a counter
                _futex(self._addresses[rank], _FUTEX_WAIT, low, ctypes.byref(_SLEEP))
            self._check(rank, number, waited)

    def _check(self, rank: int, number: int, waited: float) -> None:
        ended = {pidfd for pidfd, _ in self._ended.poll(0)}
        if self._counters[rank] >= number:
            return  # another rank that ended after that has finished its calls
        for other, pidfd in self._others.items():
            if pidfd in ended:
                raise RankLost(f"rank {other} has ended")
        if waited > self._timeout_s:
            raise RankLost(
                f"rank {self._ranks[rank]} is {self._timeout_s:g} s late in a collective"
            )

    def _fence(self) -> None:
        """Memory fence: order the accesses to shared memory before and after it, on every CPU
        architecture."""
        self._lock.release()
        self._lock.acquire()


def _pieces(flat: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of at most BUFFER_BYTES, each with the index of its first element."""
    most = BUFFER_BYTES // flat.dtype.itemsize
    for number in range(math.ceil(len(flat) / most)):
        yield flat[number * most : (number + 1) * most], number * most


def _futex(address: int, operation: int, value: int, timeout: object) -> None:
    _libc.syscall(
        ctypes.c_long(_FUTEX[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        timeout,
        None,
        ctypes.c_uint32(0),
    )
