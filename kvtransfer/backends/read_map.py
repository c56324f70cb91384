"""The bytes that one connection reads of the pages that it is given.

A map has slices by table, and of the state after the last table (common/copy_map.py). Each page of
a table is read into one page. The pages of the state are two lists, whose lengths may differ.
Equal slices are one part, whatever their tables and pages, so that a backend can prepare it once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.copy_map import Slice
from common.errors import EngineFault, LayoutMismatch
from kvtransfer.backends.base import (
    Ints,
    Moves,
    PagePool,
    RemotePool,
    check_pages,
    check_pool,
)


class PagePart(NamedTuple):
    """Bytes [source, source + size) of a producer's page, read into a page from `at` on."""

    source: int
    at: int
    size: int


class PartRead(NamedTuple):
    """A read of one part: of source_pages[i] into destination_pages[i]."""

    part: int  # its number in ReadMap.parts
    source_pages: Ints
    destination_pages: Ints


class _StatePart(NamedTuple):
    part: int
    source: Ints  # indices in the state's pages
    destination: Ints


class ReadMap:
    """The parts of pages that one connection reads."""

    def __init__(self, remote: RemotePool, pool: PagePool, moves: Moves | None = None) -> None:
        """
        Args:
            moves: None: whole pages.
        Raises:
            LayoutMismatch: the pools cannot have such pages.
        """
        check_pool(remote)
        if moves is None:
            if remote.page_bytes != pool.page_bytes:
                raise LayoutMismatch(
                    f"a page is {remote.page_bytes} bytes at the producer, {pool.page_bytes} here"
                )
            moves = ((Slice(0, 0, 0, 0, 0, pool.page_bytes),), ())
        numbers: dict[PagePart, int] = {}
        for _, source_page, source, page, at, size in (each for table in moves for each in table):
            if min(source_page, source, page, at, size - 1) < 0:
                raise LayoutMismatch(f"no {size} bytes are at {source} of a page, or at {at}")
            if source + size > remote.page_bytes or at + size > pool.page_bytes:
                raise LayoutMismatch(
                    f"{size} bytes at {source} and at {at} are outside pages of "
                    f"{remote.page_bytes} bytes at the producer and {pool.page_bytes} here"
                )
            numbers.setdefault(PagePart(source, at, size), len(numbers))
        *tables, state = moves
        self.parts = tuple(numbers)
        self._num_source, self._num_destination = remote.num_pages, pool.num_pages
        self._tables = [
            [numbers[PagePart(each.source, each.at, each.size)] for each in table]
            for table in tables
        ]
        self._state = _state_parts(state, numbers)
        self._state_pages = (
            1 + max((each.source_page for each in state), default=-1),
            1 + max((each.page for each in state), default=-1),
        )

    def reads(self, source: Ints, destination: Ints, table: int) -> list[PartRead]:
        """Return the reads of these pages of a table, or of all pages of the state.

        Raises:
            ReadRefused: the producer has no such page.
            EngineFault: this node has no such page, or the lists do not fit the map.
        """
        if table < len(self._tables):
            if len(source) != len(destination):
                raise EngineFault(f"{len(source)} pages cannot be read into {len(destination)}")
            check_pages(source, self._num_source, destination, self._num_destination)
            return [PartRead(part, source, destination) for part in self._tables[table]]
        if len(source) < self._state_pages[0] or len(destination) < self._state_pages[1]:
            raise EngineFault(
                f"a state of {self._state_pages} pages, and {len(source)} and {len(destination)} "
                f"are given"
            )
        check_pages(source, self._num_source, destination, self._num_destination)
        return [
            PartRead(part, source.take(there), destination.take(here))
            for part, there, here in self._state
        ]


def _state_parts(state: Sequence[Slice], numbers: dict[PagePart, int]) -> list[_StatePart]:
    places: dict[int, list[tuple[int, int]]] = {}
    for each in state:
        number = numbers[PagePart(each.source, each.at, each.size)]
        places.setdefault(number, []).append((each.source_page, each.page))
    pairs = {number: np.array(pages, np.int32) for number, pages in places.items()}
    return [_StatePart(number, each[:, 0], each[:, 1]) for number, each in pairs.items()]
