"""Scratch memory in the shape of a pool, which probes read from and into.

A probe of a device pool uses scratch memory of that device (device_memory.py). Otherwise it would
measure a different path than the one that pages use.
"""

import mmap
import time
from collections.abc import Callable

import numpy as np

from kvtransfer.backends.base import PROBE_BYTES, Ints, PagePool

_GIB = 1 << 30


def scratch_pages(page_bytes: int) -> int:
    """Return the number of pages in about PROBE_BYTES."""
    return max(1, PROBE_BYTES // page_bytes)


class ReadScratch:
    """About PROBE_BYTES of zeroed host pages of `page_bytes`. Freed with the object."""

    def __init__(self, page_bytes: int) -> None:
        num_pages = scratch_pages(page_bytes)
        self._memory = np.frombuffer(mmap.mmap(-1, num_pages * page_bytes), np.uint8)
        self._memory[:] = 0  # cause the page faults now, not during the measurement
        self.pool = PagePool(self._memory.ctypes.data, page_bytes, num_pages, "cpu")


def measure(num_pages: int, page_bytes: int, read: Callable[[Ints], None]) -> float:
    """Return the rate of `read` in GiB/s. Reads one page as a warm-up, then all pages."""
    pages = np.arange(num_pages, dtype=np.int32)
    read(pages[:1])
    started = time.perf_counter()
    read(pages)
    return num_pages * page_bytes / _GIB / (time.perf_counter() - started)
