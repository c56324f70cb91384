"""Host memory in huge pages, if the system has them, and its release.

A processor translates an address for every 4 KiB that it reads, or every 2 MiB with huge pages. One
core reads matrices of many MiB twice as fast with huge pages.
"""

import contextlib
import ctypes
import math
import mmap
import os

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # of linux/mman.h, since 5.14


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return untouched memory of this process in huge pages. The rest, which fills no huge page, is
    in small ones.

    Raises:
        OSError: not enough memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % HUGE_PAGE_BYTES
    # Only the requested range, so that a partly covered huge page consists of small ones.
    with contextlib.suppress(OSError):  # the system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes)
    return whole[offset : offset + num_bytes].view(dtype).view(shape)


def take(address: int, num_bytes: int) -> None:
    """Make the system allocate this memory now. Otherwise the first write takes milliseconds per
    huge page.

    Existing contents do not change. On a system without this call, the first write allocates.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + num_bytes - begin, _POPULATE_WRITE)


def release_memory(tensor: Tensor) -> None:
    """Return the memory of a tensor's storage to the system.

    The address stays valid. It reads as zero until it is written, which allocates memory again.
    Less than a page at either end stays allocated.

    Args:
        tensor: in this process's own host memory, not pinned by a device.
    Raises:
        OSError: the system rejects the call.
    """
    storage = tensor.untyped_storage()
    begin, page = storage.data_ptr(), mmap.PAGESIZE
    first, end = -(-begin // page) * page, (begin + storage.nbytes()) // page * page
    if end > first and _libc.madvise(first, end - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
