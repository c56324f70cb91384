"""The bytes of single pages, and checksums of sampled pages.

Checksums are computed on publication and compared after the read. They find errors that no protocol
can: a byte changed by a network, a driver or a device. The sample is random, so that a recurring
error is found eventually.
"""

import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from common.copy_map import ONE_RANK, NodeShape
from kvtransfer.backends.base import PagePool
from kvtransfer.ports import TablePages, tables_of
from kvtransfer.protocol.actions import PageSum
from kvtransfer.transfer.paths import ComparedBytes, Cuts


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
