"""The bytes of single pages in host memory, wherever the pool is, and checksums of sampled pages.

Checksums are computed on publication and compared after the read. They find errors that no protocol
can: a byte changed by a network, a driver or a device. The sample is random, so that a recurring
error is found eventually.
"""

import ctypes
import random
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Protocol

import torch
import xxhash

from common.copy_map import ONE_RANK, NodeShape
from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import DeviceRuntime, cuda_device
from kvtransfer.ports import TablePages, tables_of
from kvtransfer.protocol.actions import PageSum
from kvtransfer.transfer.rank_paths import ComparedBytes, Cuts

_MOST_BYTES, _MOST_PAGES = 16 << 20, 64  # limits of pinned memory, and of pages copied together


class PageBytes(Protocol):
    """Access to pages' bytes. For one thread."""

    def each(self, pages: Sequence[int]) -> Iterator[memoryview]:
        """Yield the bytes of each page as they are now. They are valid until the next one.

        Raises:
            TransferError: the device has failed.
        """
        ...


class HostPageBytes:
    """Bytes of host pages, read in place."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def each(self, pages: Sequence[int]) -> Iterator[memoryview]:
        size = self._pool.page_bytes
        for page in pages:
            yield memoryview((ctypes.c_char * size).from_address(self._pool.base + page * size))


class DevicePageBytes:
    """Copies in pinned memory, made concurrently with forwards. For sampling: several pages are
    copied together and waited for once, which takes about 10 us plus the time of their bytes on the
    bus.
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

    # Created later, when the thread that needs them has called the device's `use`.

    @cached_property
    def _pages(self) -> torch.Tensor:
        return self._device.view(self._pool)

    @cached_property
    def _copies(self) -> torch.Tensor:
        page_bytes = self._pool.page_bytes
        num_pages = max(1, min(_MOST_PAGES, _MOST_BYTES // page_bytes))
        return self._device.empty_host(num_pages, page_bytes, dtype=torch.uint8)


def page_bytes_of(pool: PagePool) -> PageBytes:
    """Return access to a pool's bytes. Raises TransferError if the pool is not on the device it
    names.
    """
    if pool.device == "cpu":
        return HostPageBytes(pool)
    return DevicePageBytes(pool, cuda_device(pool.device))


def _checksum(content: memoryview, cuts: Cuts | None) -> int:
    if cuts is None:
        return xxhash.xxh3_64_intdigest(content)
    checksum = xxhash.xxh3_64()
    for at, size in cuts:
        checksum.update(content[at : at + size])
    return checksum.intdigest()


class PageChecksums:
    """The sampling and comparison of checksums. Transfer thread only. Methods that compute
    checksums raise TransferError if a device has failed.

    Args:
        every: one page in `every` is sampled. 0: none.
        compared: the bytes of pages that nodes with other numbers of ranks compare.
    """

    def __init__(self, pages: PageBytes, every: int, compared: ComparedBytes | None = None) -> None:
        self._pages = pages
        self._every = every
        self._compared = compared or ComparedBytes(ONE_RANK, lambda node: ())
        self._skip = self._gap()

    def take(
        self,
        pages: Sequence[int],
        spans: Sequence[TablePages] = (),
        consumer: NodeShape | None = None,
    ) -> tuple[tuple[int, int], ...]:
        """Sample some of these pages. Returns the indices of the sampled ones, in order, each with
        its checksum.

        Args:
            spans: of the pages, see ExposePages.
            consumer: None: it has the ranks that this node has.
        """
        if not self._every:
            return ()
        places = []
        place = self._skip
        while place < len(pages):
            places.append(place)
            place += self._gap() + 1
        self._skip = place - len(pages)
        tables = tables_of(spans, len(pages))
        cuts = {place: self._compared.served(consumer, tables[place]) for place in places}
        places = [place for place in places if cuts[place] != ()]
        sums = self._of([pages[place] for place in places], [cuts[place] for place in places])
        return tuple(zip(places, sums, strict=True))

    def wrong(self, expected: Sequence[PageSum], producer: NodeShape | None = None) -> list[int]:
        """Return the pages whose checksum is not the expected one. The pages must be in range.

        Args:
            producer: None: it has the ranks that this node has.
        """
        cuts = [self._compared.read(producer, each.table) for each in expected]
        sums = self._of([each.page for each in expected], cuts)
        return [
            each.page for each, found in zip(expected, sums, strict=True) if found != each.checksum
        ]

    def _of(self, pages: Sequence[int], cuts: Sequence[Cuts | None]) -> list[int]:
        """Return the 64-bit XXH3 of these bytes of each page as they are now."""
        contents = self._pages.each(pages)
        return [_checksum(*each) for each in zip(contents, cuts, strict=True)]

    def _gap(self) -> int:
        """Return the number of pages to skip before the next sampled one: random, with the right
        mean.
        """
        return random.randrange(2 * self._every - 1) if self._every else 0
