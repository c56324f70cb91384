"""Staging of device pages in pinned host memory, a few megabytes ahead of the socket.

Each connection has two slots of pinned memory. While the socket uses one slot, the device fills or
empties the other, on a copy stream. A slot holds one request, so memory here does not grow with the
size of a hand-off.

Large pages are copied one by one. For small pages, starting a copy costs more than moving the
bytes. They are packed on the device and moved by one copy.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.pages.copy import copy_pages
from kernels.pages.pack import pack_pages, unpack_pages
from kvtransfer.backends.base import Ints, PageCut, PagePool
from kvtransfer.backends.device_memory import CopyMark, CopyQueue, DeviceRuntime
from kvtransfer.backends.scatter import Vectors, address_of
from kvtransfer.backends.tcp.memory import Load
from kvtransfer.backends.tcp.wire import MAX_REQUEST_PAGES, FrameKind, max_request_bytes

_NUM_SLOTS = 2
_LARGE_PAGE_BYTES = 1 << 20  # 20 us at 50 GB/s, several times the cost of enqueuing a copy
_PACK_BYTES = 16  # alignment of sizes and addresses that pack_pages needs


class StagedMemory:
    """A pool in device memory, and scratch pages on the device, for tcp connections."""

    def __init__(self, pool: PagePool, device: DeviceRuntime) -> None:
        """Raises TransferError if the pool is not on that device, or device memory is short."""
        device.use()
        self._device = device
        scratch = device.scratch(pool.page_bytes)
        self._pages = {FrameKind.POOL: device.view(pool), FrameKind.SCRATCH: scratch}
        self.scratch_pages = len(scratch)
        aligned = not (pool.base % _PACK_BYTES or pool.page_bytes % _PACK_BYTES)
        if aligned and pool.page_bytes < _LARGE_PAGE_BYTES:
            self._slot: type[_Slot] = _PackingSlot
            self._rehearse()
        else:
            self._slot = _Slot

    def departures(self) -> "_StagedDepartures":
        self._device.use()
        return _StagedDepartures(self._pages, self._slots(), self._device.queue("to host"))

    def arrivals(self) -> "_StagedArrivals":
        self._device.use()
        return _StagedArrivals(self._pages, self._slots(), self._device.queue("to device"))

    def _slots(self) -> "list[_Slot]":
        page_bytes = self._pages[FrameKind.POOL].shape[1]
        return [self._slot(self._device, page_bytes) for _ in range(_NUM_SLOTS)]

    def _rehearse(self) -> None:
        """Compile the pack and unpack kernels before the first read, by packing a scratch page."""
        scratch, page = self._pages[FrameKind.SCRATCH], np.zeros(1, np.int32)
        whole = PageCut(0, scratch.shape[1])
        slot = self._slot(self._device, scratch.shape[1])
        slot.fetch(scratch, page, whole, self._device.queue("to host"))
        slot.wait()
        slot.bring(scratch, page, whole, self._device.queue("to device"))
        slot.wait()


class _Slot:
    """Pinned host memory for one request, and the copies between it and the device."""

    def __init__(self, device: DeviceRuntime, page_bytes: int) -> None:
        self.num_bytes = max_request_bytes(page_bytes)
        self.host = device.empty_host(self.num_bytes, dtype=torch.uint8)
        self._mark: CopyMark | None = None

    def fetch(self, pool: Tensor, pages: Ints, cut: PageCut, queue: CopyQueue) -> None:
        """Start to copy the byte range `cut` of these pages into the slot, over its old content."""
        self._begin(queue, partial(self._copy_out, pool, pages, cut))

    def bring(self, pool: Tensor, pages: Ints, cut: PageCut, queue: CopyQueue) -> None:
        """Start to copy the slot's content into the byte range `cut` of these pages."""
        self._begin(queue, partial(self._copy_in, pool, pages, cut))

    def wait(self) -> None:
        """Wait until the slot's copies have finished. Raises DeviceFailure."""
        if self._mark is not None:
            self._mark.wait()
            self._mark = None

    def vectors(self, num_bytes: int, head: bytearray) -> Vectors:
        """Return the iovecs of `head` and num_bytes of the slot. Raises DeviceFailure."""
        self.wait()
        return np.array(
            [[address_of(head), len(head)], [self.host.data_ptr(), num_bytes]], np.uint64
        )

    def _copy_out(self, pool: Tensor, pages: Ints, cut: PageCut) -> None:
        host = _rows(self.host, len(pages), cut)
        if cut.size == pool.shape[1]:
            copy_pages(pool, torch.tensor(pages), host, torch.arange(len(pages)))
            return
        for row, page in zip(host, pages.tolist(), strict=True):
            row.copy_(pool[page].narrow(0, *cut), non_blocking=True)

    def _copy_in(self, pool: Tensor, pages: Ints, cut: PageCut) -> None:
        host = _rows(self.host, len(pages), cut)
        if cut.size == pool.shape[1]:
            copy_pages(host, torch.arange(len(pages)), pool, torch.tensor(pages))
            return
        for row, page in zip(host, pages.tolist(), strict=True):
            pool[page].narrow(0, *cut).copy_(row, non_blocking=True)

    def _begin(self, queue: CopyQueue, copies: "partial[None]") -> None:
        try:
            queue.add(copies)
        finally:
            self._mark = queue.mark()  # also covers copies that were enqueued before one failed


class _PackingSlot(_Slot):
    """A slot for small pages, with a buffer of the same size on the device, to pack them."""

    def __init__(self, device: DeviceRuntime, page_bytes: int) -> None:
        super().__init__(device, page_bytes)
        self._packed = device.empty(*self.host.shape, dtype=torch.uint8)
        self._host_ids = device.empty_host(MAX_REQUEST_PAGES, dtype=torch.int32)
        self._ids = device.empty(MAX_REQUEST_PAGES, dtype=torch.int32)

    def fetch(self, pool: Tensor, pages: Ints, cut: PageCut, queue: CopyQueue) -> None:
        self._host_ids.numpy()[: len(pages)] = pages
        super().fetch(pool, pages, cut, queue)

    def bring(self, pool: Tensor, pages: Ints, cut: PageCut, queue: CopyQueue) -> None:
        self._host_ids.numpy()[: len(pages)] = pages
        super().bring(pool, pages, cut, queue)

    def _copy_out(self, pool: Tensor, pages: Ints, cut: PageCut) -> None:
        if cut.at % _PACK_BYTES or cut.size % _PACK_BYTES:
            return super()._copy_out(pool, pages, cut)
        n, num_bytes = len(pages), len(pages) * cut.size
        self._ids[:n].copy_(self._host_ids[:n], non_blocking=True)
        pack_pages(pool, self._ids[:n], _rows(self._packed, n, cut), offset=cut.at)
        self.host[:num_bytes].copy_(self._packed[:num_bytes], non_blocking=True)

    def _copy_in(self, pool: Tensor, pages: Ints, cut: PageCut) -> None:
        if cut.at % _PACK_BYTES or cut.size % _PACK_BYTES:
            return super()._copy_in(pool, pages, cut)
        n, num_bytes = len(pages), len(pages) * cut.size
        self._ids[:n].copy_(self._host_ids[:n], non_blocking=True)
        self._packed[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        unpack_pages(_rows(self._packed, n, cut), pool, self._ids[:n], offset=cut.at)


def _rows(memory: Tensor, num_pages: int, cut: PageCut) -> Tensor:
    """Return the start of a slot's memory as [num_pages, cut.size]."""
    return memory[: num_pages * cut.size].view(num_pages, cut.size)


class _StagedDepartures:
    """The sending side of a connection. A page is published only after the forward pass that wrote
    it, so a copy waits for nothing.
    """

    num_ahead = _NUM_SLOTS - 1  # the other slot is being sent

    def __init__(
        self, pages: dict[FrameKind, Tensor], slots: list[_Slot], queue: CopyQueue
    ) -> None:
        self._pages = pages
        self._slots = slots
        self._queue = queue

    def begin(self, kind: FrameKind, pages: Ints, cut: PageCut) -> Load:
        slot = self._slots.pop(0)  # its bytes have been sent
        self._slots.append(slot)
        slot.fetch(self._pages[kind], pages, cut, self._queue)
        return partial(slot.vectors, len(pages) * cut.size)

    def close(self) -> None:
        for slot in self._slots:
            slot.wait()


class _StagedArrivals:
    """The receiving side of a connection. A forward pass launched after a copy has finished sees
    its data, because the device orders new work after work that the host has seen completed.
    """

    def __init__(
        self, pages: dict[FrameKind, Tensor], slots: list[_Slot], queue: CopyQueue
    ) -> None:
        self._pages = pages
        self._slots = slots
        self._queue = queue
        self.request_bytes = slots[0].num_bytes

    def vectors(self, pages: Ints, head: bytearray, kind: FrameKind, cut: PageCut) -> Vectors:
        return self._slots[0].vectors(len(pages) * cut.size, head)

    def landed(self, pages: Ints, kind: FrameKind, cut: PageCut) -> None:
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.bring(self._pages[kind], pages, cut, self._queue)

    def settle(self) -> None:
        for slot in self._slots:
            slot.wait()
