"""Memory of a backend's own that has the shape of a pool: what probes read from and into.

A probe of a device's pool reads scratch of that device (device_memory.py), or it would measure
another path than the pages take.
"""

import mmap
import time
from collections.abc import Callable

import numpy as np

from kvtransfer.backends.base import PROBE_BYTES, Ints, PagePool

_GIB = 1 << 30


def scratch_pages(page_bytes: int) -> int:
    """How many pages make about PROBE_BYTES."""
    return max(1, PROBE_BYTES // page_bytes)


class Scratch:
    """About PROBE_BYTES of zeroed host pages of `page_bytes`; freed with the object."""

    def __init__(self, page_bytes: int) -> None:
        num_pages = scratch_pages(page_bytes)
        self._memory = np.frombuffer(mmap.mmap(-1, num_pages * page_bytes), np.uint8)
        self._memory[:] = 0  # page faults belong here, not into the measurement
        self.pool = PagePool(self._memory.ctypes.data, page_bytes, num_pages, "cpu")


def measure(num_pages: int, page_bytes: int, read: Callable[[Ints], None]) -> float:
    """GiB/s of `read`, called with page ids: once with one page to wake the path, once with all."""
    pages = np.arange(num_pages, dtype=np.int32)
    read(pages[:1])
    started = time.perf_counter()
    read(pages)
    return num_pages * page_bytes / _GIB / (time.perf_counter() - started)
