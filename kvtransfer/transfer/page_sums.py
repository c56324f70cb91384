"""Checksums of some pages, taken where they are published and compared where they have been read.

They find what no protocol can: a byte that a network, a driver or a device has changed on its way.
Which pages are taken nobody can foresee, so that what goes wrong again and again is met.
"""

import ctypes
import random
from collections.abc import Iterable, Sequence

import xxhash

from kvtransfer.backends.base import PagePool


class PageSums:
    """Transfer thread only. Of pages in host memory; of others none are taken.

    Args:
        every: one page in so many is taken; 0: none.
    """

    def __init__(self, pool: PagePool, every: int) -> None:
        self._pool = pool
        self._every = every if pool.device == "cpu" else 0
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
        size = self._pool.page_bytes
        memory = (ctypes.c_char * size).from_address(self._pool.base + page * size)
        return xxhash.xxh3_64_intdigest(memoryview(memory))

    def _gap(self) -> int:
        """Pages before the next one that is taken: as many on average as are wanted."""
        return random.randrange(2 * self._every - 1) if self._every else 0
