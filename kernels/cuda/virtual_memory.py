"""Device memory that can be released while its addresses stay reserved.

A region reserves addresses once. Memory is mapped there in extents, released, and mapped again.
CUDA graphs, tensors and registrations that refer to the addresses stay valid. While the memory is
released, any access to the addresses is a device fault.

torch's allocator does not count this memory, so `VirtualMemory.mapped_bytes` does.
"""

import ctypes
import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.cuda import driver
from kernels.cuda.driver import CudaError, OutOfDeviceMemory, bytes_at

# Constants of cuda.h.
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_RDMA_SUPPORTED = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class VirtualMemoryDriver(Protocol):
    """Driver functions for the memory of one device. Sizes and addresses are multiples of
    `granularity`. A function that raises CudaError has changed nothing.
    """

    @property
    def granularity(self) -> int: ...

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses, and return the first one. They are never freed."""
        ...

    def create(self, num_bytes: int) -> int:
        """Allocate memory without an address, and return its handle. Raises OutOfDeviceMemory."""
        ...

    def release(self, handle: int) -> None:
        """Release memory that is not mapped."""
        ...

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Give memory an address. Access is not allowed yet."""
        ...

    def allow(self, address: int, num_bytes: int) -> None:
        """Allow the device to read and write mapped memory."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo one call of `map`, with the same range."""
        ...

    def settle(self) -> None:
        """Wait until the device has finished all work of this process."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that is free on the device."""
        ...

    def view(self, address: int, num_bytes: int) -> Tensor:
        """Return mapped memory as uint8 [num_bytes]. The tensor does not keep it alive."""
        ...


class VirtualMemory:
    """The regions of one device of this process.

    Attributes:
        mapped_bytes: memory of all regions together.
    """

    def __init__(self, driver: VirtualMemoryDriver) -> None:
        self.driver = driver
        self.mapped_bytes = 0

    def reserve(self, num_bytes: int, extent_bytes: int = 0) -> "Region":
        """Return a region of at least this size, without memory.

        Args:
            extent_bytes: size of one allocation. 0: one for the whole region, which registration at
                a network card may require.
        """
        return Region(self, num_bytes, extent_bytes or num_bytes)


class Region:
    """A range of addresses, and the memory mapped there. One thread at a time may use it.

    Attributes:
        num_bytes: size, rounded up to the driver's granularity.
    """

    def __init__(self, memory: VirtualMemory, num_bytes: int, extent_bytes: int) -> None:
        self._memory = memory
        self._driver = memory.driver
        self._extent_bytes = self._rounded(extent_bytes)
        self.num_bytes = self._rounded(num_bytes)
        self.address = self._driver.reserve(self.num_bytes)
        self._handles: list[int] = []  # by extent

    @property
    def mapped_bytes(self) -> int:
        """Number of bytes with memory, from the start of the region."""
        return min(len(self._handles) * self._extent_bytes, self.num_bytes)

    def map(self, num_bytes: int | None = None) -> None:
        """Map memory to the first bytes, or to the whole region. New memory has undefined content.
        Memory that is already mapped keeps its content.

        Raises:
            OutOfDeviceMemory: memory is short. Nothing has changed.
            CudaError: another failure. Nothing has changed.
        """
        wanted = self.num_bytes if num_bytes is None else num_bytes
        before = len(self._handles)
        missing = wanted - self.mapped_bytes
        try:
            while self.mapped_bytes < wanted:
                self._map_extent()
        except CudaError as error:
            self._unmap_from(before)
            if isinstance(error, OutOfDeviceMemory):
                left = self._driver.free_bytes()
                raise OutOfDeviceMemory(
                    f"{missing / 2**30:.2f} GiB are needed, {left / 2**30:.2f} GiB are free"
                ) from error
            raise

    def release(self) -> None:
        """Wait until the device is idle, then release all memory. Nothing may access the addresses
        until `map`. No effect without memory."""
        if self._handles:
            self._driver.settle()
            self._unmap_from(0)

    def tensor(self, start: int, num_bytes: int) -> Tensor:
        """Return mapped bytes as uint8 [num_bytes]. The addresses never change."""
        return self._driver.view(self.address + start, num_bytes)

    def _map_extent(self) -> None:
        address, size = self._extent(len(self._handles))
        handle = self._driver.create(size)
        try:
            self._driver.map(address, size, handle)
            try:
                self._driver.allow(address, size)
            except CudaError:
                self._driver.unmap(address, size)
                raise
        except CudaError:
            self._driver.release(handle)
            raise
        self._handles.append(handle)
        self._memory.mapped_bytes += size

    def _unmap_from(self, first: int) -> None:
        """Release the extents from index `first` on, the last one first."""
        while len(self._handles) > first:
            address, size = self._extent(len(self._handles) - 1)
            self._driver.unmap(address, size)
            self._memory.mapped_bytes -= size
            self._driver.release(self._handles.pop())

    def _extent(self, number: int) -> tuple[int, int]:
        start = number * self._extent_bytes
        return self.address + start, min(self._extent_bytes, self.num_bytes - start)

    def _rounded(self, num_bytes: int) -> int:
        unit = self._driver.granularity
        return -(-num_bytes // unit) * unit


@functools.cache
def virtual_memory(index: int) -> VirtualMemory:
    """Return a CUDA device's VirtualMemory. Calls no driver before a region is reserved."""
    return VirtualMemory(CudaDriver(index))


class CudaDriver:
    """The functions of a CUDA device, see VirtualMemoryDriver."""

    def __init__(self, index: int) -> None:
        self._index = index

    @functools.cached_property
    def granularity(self) -> int:
        found = ctypes.c_size_t()
        properties = ctypes.byref(self._properties)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), properties, _MINIMUM)
        return found.value

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, *_ZEROS, _NO_FLAGS)
        return address.value

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        size, properties = ctypes.c_size_t(num_bytes), ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), size, properties, _NO_FLAGS)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        offset = ctypes.c_size_t(0)
        self._call(
            "cuMemMap", *_range(address, num_bytes), offset, ctypes.c_uint64(handle), _NO_FLAGS
        )

    def allow(self, address: int, num_bytes: int) -> None:
        access = _Access(self._properties.location, _READ_WRITE)
        count = ctypes.c_size_t(1)
        self._call("cuMemSetAccess", *_range(address, num_bytes), ctypes.byref(access), count)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", *_range(address, num_bytes))

    def settle(self) -> None:
        self._call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def view(self, address: int, num_bytes: int) -> Tensor:
        return bytes_at(address, (num_bytes,), torch.device("cuda", self._index))

    @functools.cached_property
    def _properties(self) -> "_Properties":
        supported, device = ctypes.c_int(), driver.device(self._index)
        attribute = ctypes.c_int(_RDMA_SUPPORTED)
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), attribute, device)
        return _Properties(
            type=_PINNED,
            location=_Location(_ON_DEVICE, device.value),
            gpu_direct_rdma=bool(supported.value),
        )

    def _call(self, function: str, *arguments: Any) -> None:
        driver.use(self._index)  # calls come from several threads
        driver.call(function, *arguments)


_ZEROS = ctypes.c_size_t(0), ctypes.c_uint64(0)  # any alignment, any address
_NO_FLAGS = ctypes.c_ulonglong(0)


def _range(address: int, num_bytes: int) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
    return ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))
