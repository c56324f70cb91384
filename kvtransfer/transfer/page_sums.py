"""Checksums of some pages, taken where they are published and compared where they have been read.

They find what no protocol can: a byte that a network, a driver or a device has changed on its way.
Which pages are taken nobody can foresee, so that what goes wrong again and again is met.
"""

import random
from collections.abc import Iterable, Sequence

import xxhash

from kvtransfer.transfer.page_bytes import PageBytes


class PageSums:
    """Transfer thread only. What asks for a sum raises TransferError where a device has failed.

    Args:
        every: one page in so many is taken; 0: none.
    """

    def __init__(self, pages: PageBytes, every: int) -> None:
        self._pages = pages
        self._every = every
        self._skip = self._gap()

    def take(self, pages: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The places of those that are taken among these pages, in order, each with its sum."""
        if not self._every:
            return ()
        found = []
        place = self._skip
        while place < len(pages):
            found.append((place, self.of(pages[place])))
            place += self._gap() + 1
        self._skip = place - len(pages)
        return tuple(found)

    def wrong(self, expected: Iterable[tuple[int, int]]) -> list[int]:
        """The pages whose sum is not the one that is expected. Those pages must be in range."""
        return [page for page, checksum in expected if self.of(page) != checksum]

    def of(self, page: int) -> int:
        """XXH3, 64 bit, of the page as it is now."""
        return xxhash.xxh3_64_intdigest(self._pages.of(page))

    def _gap(self) -> int:
        """Pages before the next one that is taken: as many on average as are wanted."""
        return random.randrange(2 * self._every - 1) if self._every else 0
