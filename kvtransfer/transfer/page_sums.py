"""Checksums of sampled pages, computed on publication and compared after the read.

They find errors that no protocol can: a byte changed by a network, a driver or a device. The sample
is random, so that a recurring error is found eventually.
"""

import random
from collections.abc import Sequence

import xxhash

from kvtransfer.transfer.page_bytes import PageBytes


class PageChecksums:
    """The sampling and comparison of checksums. Transfer thread only. Methods that compute
    checksums raise TransferError if a device has failed.

    Args:
        every: one page in so many is sampled. 0: none.
    """

    def __init__(self, pages: PageBytes, every: int) -> None:
        self._pages = pages
        self._every = every
        self._skip = self._gap()

    def take(self, pages: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Sample some of these pages. Returns the indices of the sampled ones, in order, each with
        its checksum.
        """
        if not self._every:
            return ()
        places = []
        place = self._skip
        while place < len(pages):
            places.append(place)
            place += self._gap() + 1
        self._skip = place - len(pages)
        return tuple(zip(places, self._of([pages[place] for place in places]), strict=True))

    def wrong(self, expected: Sequence[tuple[int, int]]) -> list[int]:
        """Return the pages whose checksum is not the expected one. The pages must be in range."""
        sums = self._of([page for page, _ in expected])
        return [
            page
            for (page, checksum), found in zip(expected, sums, strict=True)
            if found != checksum
        ]

    def _of(self, pages: Sequence[int]) -> list[int]:
        """Return the 64-bit XXH3 of each page as it is now."""
        return [xxhash.xxh3_64_intdigest(content) for content in self._pages.each(pages)]

    def _gap(self) -> int:
        """Return the number of pages to skip before the next sampled one: random, with the right
        mean.
        """
        return random.randrange(2 * self._every - 1) if self._every else 0
