"""The bytes of single pages of device memory, copied to the host for checksums."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import DeviceRuntime, cuda_device
from kvtransfer.transfer.paths import HostPageBytes, PageBytes

_MOST_BYTES, _MOST_PAGES = 16 << 20, 64  # limits of pinned memory, and of pages copied together


class DevicePageBytes:
    """Copies pages into pinned memory, concurrently with forward passes. Several pages are copied
    together and waited for once, which takes about 10 us plus the transfer time.
    """

    def __init__(self, pool: PagePool, device: DeviceRuntime) -> None:
        self._pool = pool
        self._device = device

    def each(self, pages: Sequence[int]) -> Iterator[memoryview]:
        self._device.use()
        queue = self._device.queue("to host")
        most = len(self._copies)
        for start in range(0, len(pages), most):
            some = pages[start : start + most]
            for page, copy in zip(some, self._copies, strict=False):
                queue.add(partial(copy.copy_, self._pages[page], non_blocking=True))
            queue.mark().wait()
            yield from (copy.numpy().data for copy in self._copies[: len(some)])

    # Created on first use, when the thread that needs them has called the device's `use`.

    @cached_property
    def _pages(self) -> torch.Tensor:
        return self._device.view(self._pool)

    @cached_property
    def _copies(self) -> torch.Tensor:
        page_bytes = self._pool.page_bytes
        num_pages = max(1, min(_MOST_PAGES, _MOST_BYTES // page_bytes))
        return self._device.empty_host(num_pages, page_bytes, dtype=torch.uint8)


def page_bytes_of(pool: PagePool) -> PageBytes:
    """Return access to the bytes of a pool's pages. Raises TransferError if the pool is not on the
    named device.
    """
    if pool.device == "cpu":
        return HostPageBytes(pool)
    return DevicePageBytes(pool, cuda_device(pool.device))
