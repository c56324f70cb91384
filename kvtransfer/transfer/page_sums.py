"""Checksums of some pages, taken where they are published and compared where they have been read.

They find what no protocol can: a byte that a network, a driver or a device has changed on its way.
Which pages are taken nobody can foresee, so that what goes wrong again and again is met.
"""

import random
from collections.abc import Sequence

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
        places = []
        place = self._skip
        while place < len(pages):
            places.append(place)
            place += self._gap() + 1
        self._skip = place - len(pages)
        return tuple(zip(places, self._of([pages[place] for place in places]), strict=True))

    def wrong(self, expected: Sequence[tuple[int, int]]) -> list[int]:
        """The pages whose sum is not the one that is expected. Those pages must be in range."""
        sums = self._of([page for page, _ in expected])
        return [
            page
            for (page, checksum), found in zip(expected, sums, strict=True)
            if found != checksum
        ]

    def _of(self, pages: Sequence[int]) -> list[int]:
        """Return XXH3, 64 bit, of each page as it is now."""
        return [xxhash.xxh3_64_intdigest(content) for content in self._pages.each(pages)]

    def _gap(self) -> int:
        """Pages before the next one that is taken: as many on average as are wanted."""
        return random.randrange(2 * self._every - 1) if self._every else 0
