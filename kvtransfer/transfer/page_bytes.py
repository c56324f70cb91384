"""The bytes of single pages, as the host sees them, wherever the pool is."""

import ctypes
from functools import cached_property, partial
from typing import Protocol

import torch

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import Device, cuda_device


class PageBytes(Protocol):
    """For one thread."""

    def of(self, page: int) -> memoryview:
        """As they are now, until the next call. Raises TransferError: the device has failed."""
        ...


class HostPageBytes:
    """Where they are."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def of(self, page: int) -> memoryview:
        size = self._pool.page_bytes
        return memoryview((ctypes.c_char * size).from_address(self._pool.base + page * size))


class DevicePageBytes:
    """A copy in pinned memory, made beside the forwards. It takes some 10 us, and what a page's
    bytes take over the bus: for sampling."""

    def __init__(self, pool: PagePool, device: Device) -> None:
        self._pool = pool
        self._device = device

    def of(self, page: int) -> memoryview:
        self._device.use()
        queue = self._device.queue("to host")
        queue.add(partial(self._copy.copy_, self._pages[page], non_blocking=True))
        queue.mark().wait()
        return self._copy.numpy().data

    # Once the thread that wants them is one of the device's.

    @cached_property
    def _pages(self) -> torch.Tensor:
        return self._device.view(self._pool)

    @cached_property
    def _copy(self) -> torch.Tensor:
        return self._device.empty_host(self._pool.page_bytes, dtype=torch.uint8)


def page_bytes_of(pool: PagePool) -> PageBytes:
    """Raises TransferError where the pool is not where it says."""
    if pool.device == "cpu":
        return HostPageBytes(pool)
    return DevicePageBytes(pool, cuda_device(pool.device))
