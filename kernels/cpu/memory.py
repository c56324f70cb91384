"""Host memory in huge pages, where the system has them.

A processor finds the address of a page again for every 4 KiB that it reads, or for every 2 MiB: one
core reads matrices of many MiB twice as fast by the latter.
"""

import contextlib
import ctypes
import math
import mmap
import os

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # of linux/mman.h, from 5.14 on


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Untouched memory of this process; what is left of a huge page at the end is in small ones.

    Raises:
        OSError: there is not so much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % HUGE_PAGE_BYTES
    # No further than what is asked for: a huge page that lies in it in part is made of small ones.
    with contextlib.suppress(OSError):  # of a system that has none
        memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes)
    return whole[offset : offset + num_bytes].view(dtype).view(shape)


def take(address: int, num_bytes: int) -> None:
    """Has the system give this memory of this process's now, which whoever writes there first would
    wait for: milliseconds for a huge page. What is there stays as it is. A system that has no call
    for it gives it then."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + num_bytes - begin, _POPULATE_WRITE)


def give_back(tensor: Tensor) -> None:
    """Gives the memory of a tensor's storage back to the system. It keeps its address: what is read
    there is zero until somebody writes, and then the memory is there again. Less than a page at
    either end stays.

    Args:
        tensor: in host memory of this process's own, which no device has pinned.
    Raises:
        OSError: the system does not take it.
    """
    storage = tensor.untyped_storage()
    begin, page = storage.data_ptr(), mmap.PAGESIZE
    first, end = -(-begin // page) * page, (begin + storage.nbytes()) // page * page
    if end > first and _libc.madvise(first, end - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
