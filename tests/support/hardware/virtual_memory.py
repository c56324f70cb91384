"""A fake driver of virtual memory in host memory: released memory cannot be accessed.

Any access to an unmapped address is a SIGSEGV. New memory contains 0xFF, which is NaN in every
float type. Calls that the real driver rejects fail, and a test may make others fail.
"""

import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cuda.driver import CudaError, OutOfDeviceMemory
from kernels.cuda.virtual_memory import VirtualMemory

UNIT = 2 << 20
GARBAGE = 0xFF
_FIXED, _NO_RESERVE = 0x10, 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)


def _map(address: int | None, num_bytes: int, protection: int, flags: int = 0) -> int:
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    mapped = _libc.mmap(address, num_bytes, protection, flags, -1, 0)
    assert mapped not in (None, ctypes.c_void_p(-1).value), "no memory"
    return int(mapped)


class HostDriver:
    """A VirtualMemoryDriver over host memory.

    Attributes:
        log: names of calls in order. A test may add entries.
        total: bytes of the device.
        fails: called with the name of a call and the number of earlier calls of that name. If the
            result is true, the call fails.
    """

    granularity = UNIT

    def __init__(self, total: int = 1 << 40) -> None:
        self.log: list[str] = []
        self.total = total
        self.fails: Callable[[str, int], bool] = lambda name, number: False
        self.handles: dict[int, int] = {}  # sizes by handle
        self.mapped: dict[int, tuple[int, int]] = {}  # by address: size and handle
        self._allowed: set[int] = set()
        self._next = 1

    def reserve(self, num_bytes: int) -> int:
        self._call("reserve", num_bytes)
        address = _map(None, num_bytes + UNIT, _PROT_NONE)
        return -(-address // UNIT) * UNIT

    def create(self, num_bytes: int) -> int:
        self._call("create", num_bytes)
        if num_bytes > self.free_bytes():
            raise OutOfDeviceMemory("create: not enough memory")
        self._next += 1
        self.handles[self._next] = num_bytes
        return self._next

    def release(self, handle: int) -> None:
        self._call("release")
        assert handle not in {held for _, held in self.mapped.values()}, "it is mapped"
        del self.handles[handle]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("map", address, num_bytes)
        assert self.handles[handle] == num_bytes, "another size than allocated"
        for start, (size, _) in self.mapped.items():
            assert address + num_bytes <= start or start + size <= address, "mapped already"
        self.mapped[address] = num_bytes, handle

    def allow(self, address: int, num_bytes: int) -> None:
        self._call("allow", address, num_bytes)
        assert self.mapped[address][0] == num_bytes
        self._allowed.add(address)
        _map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED)
        ctypes.memset(address, GARBAGE, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("unmap", address, num_bytes)
        assert self.mapped.pop(address)[0] == num_bytes, "not as it was mapped"
        self._allowed.discard(address)
        _map(address, num_bytes, _PROT_NONE, _FIXED)

    def settle(self) -> None:
        self._call("settle")

    def free_bytes(self) -> int:
        return self.total - sum(self.handles.values())

    def view(self, address: int, num_bytes: int) -> Tensor:
        end = address + num_bytes
        inside = [
            min(end, start + size) - max(address, start)
            for start, (size, _) in self.mapped.items()
            if start in self._allowed and start < end and address < start + size
        ]
        assert sum(inside) == num_bytes, "not mapped"
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _call(self, name: str, *multiples: int) -> None:
        assert all(each % UNIT == 0 for each in multiples), f"{name}: {multiples}"
        number = self.log.count(name)
        self.log.append(name)
        if self.fails(name, number):
            raise CudaError(f"{name}: failed by the test")


def host_memory(total: int = 1 << 40) -> VirtualMemory:
    """Return virtual memory of a HostDriver."""
    return VirtualMemory(HostDriver(total))
