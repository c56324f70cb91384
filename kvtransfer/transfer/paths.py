"""The data paths of a node or a rank, independent of the backends: links to producers, offers to
consumers, and the checksums of pages.

Checksums of sampled pages are computed on publication and compared after the read. They detect
errors that the protocol cannot, such as a byte changed by a network, a driver or a device. The
sample is random, so a recurring error is detected eventually.
"""

import ctypes
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import xxhash

from common.copy_map import ONE_RANK, NodeShape, RankPages, Slice, copy_map
from common.errors import LayoutMismatch
from kvtransfer.backends.base import Ints, PagePool
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import PIECES, STATE, TablePages, tables_of
from kvtransfer.protocol.actions import PageSum
from kvtransfer.transfer.link import Notify, PageLink

# Returns the pages of all ranks of a node. Raises LayoutMismatch if there is no such node.
PagesByRank: TypeAlias = Callable[[NodeShape], Sequence[RankPages]]
Cuts: TypeAlias = tuple[tuple[int, int], ...]  # (begin, size) of byte ranges in a page

MOST_KNOWN = 8  # cached shapes of producers


class PathOffers(Protocol):
    """The data paths over which consumers read the pages of a node, or of one rank. See
    PageProducer. Used by the transfer thread, or, while there are no consumers, by one other
    thread.
    """

    def prepare(self, consumer: int) -> Sequence[Future[Any]]: ...

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        """Return the paths of a consumer, in the order in which it should try them."""
        ...

    def dismiss(self, consumer: int) -> None: ...

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        """Let a consumer read pages. It can when all futures are done."""
        ...

    def withdraw(self, consumer: int, pages: Ints) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> Sequence[Future[Any]]:
        """Stop serving. When all futures are done, no path refers to the pages any more."""
        ...

    def open(self) -> Sequence[Future[Any]]:
        """Serve again after `close`, at the same addresses, once all futures are done. Blocks while
        the pages are registered. Raises ConfigError if no path can be served.
        """
        ...


class LinkOpener(Protocol):
    """Opens links to producers, for a node or one rank."""

    def check(self, hello: PairHello) -> None:
        """Raise LayoutMismatch if the pages of a producer cannot be read."""
        ...

    def open(self, hello: PairHello, backend: str, notify: Notify) -> PageLink:
        """Open a link to a producer over one backend. If the producer does not offer it, the link
        closes at once.
        """
        ...


class ComparedBytes:
    """The bytes of pages that checksums cover between nodes with different numbers of ranks: the
    bytes that the consumer's rank 0 reads from the producer's rank 0, in the order of its ReadMap.

    Args:
        node: ranks of this node.
    """

    def __init__(self, node: NodeShape, pages_by_rank: PagesByRank) -> None:
        self._node = node
        self._pages_by_rank = pages_by_rank
        self._slices = lru_cache(MOST_KNOWN)(self._computed)

    def served(self, consumer: NodeShape | None, table: int) -> Cuts | None:
        """Return the compared bytes of a page of a table that `consumer` reads. None: the whole
        page. The state is not compared.
        """
        if consumer is None or consumer == self._node:
            return None
        return tuple((each.source, each.size) for each in self._slices(consumer, self._node)[table])

    def read(self, producer: NodeShape | None, table: int) -> Cuts | None:
        """Return the compared bytes of a table's page that was read from `producer`. None: all
        bytes.
        """
        if producer is None or producer == self._node:
            return None
        return tuple((each.at, each.size) for each in self._slices(self._node, producer)[table])

    def _computed(
        self, consumer: NodeShape, producer: NodeShape
    ) -> Mapping[int, tuple[Slice, ...]]:
        try:
            mine, producers = self._pages_by_rank(consumer)[0], self._pages_by_rank(producer)
            *tables, _ = map_of(0, mine, producers)
        except LayoutMismatch:  # the consumer ends such a pair
            return defaultdict(tuple)
        *of_tables, pieces = [
            tuple(each for each in table if each.producer_rank == 0) for table in tables
        ]
        return {**dict(enumerate(of_tables)), PIECES: pieces, STATE: ()}


def map_of(
    rank: int, mine: RankPages, producers: Sequence[RankPages]
) -> tuple[tuple[Slice, ...], ...]:
    """Return the byte ranges that a rank reads: for each table, weight pieces, and the state."""
    piece = Slice(0, 0, 0, 0, 0, min(mine.page_bytes, producers[0].page_bytes))
    *tables, state = copy_map(rank, mine, producers)
    return (*tables, () if rank else (piece,), state)


@dataclass(frozen=True, slots=True)
class TransferPaths:
    """All data paths of a node, or of one rank.

    Attributes:
        backends: names of the backends with which it may read.
        compared: bytes that checksums cover.
    """

    opener: LinkOpener
    offers: PathOffers
    backends: Collection[str]
    compared: ComparedBytes


class PageBytes(Protocol):
    """Access to the bytes of pages. Not thread-safe."""

    def each(self, pages: Sequence[int]) -> Iterator[memoryview]:
        """Yield the current bytes of each page, valid until the next is requested.

        Raises:
            TransferError: the device has failed.
        """
        ...


class HostPageBytes:
    """The bytes of host pages, read in place."""

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
    """Samples pages and compares their checksums. Transfer thread only. Methods that compute
    checksums raise TransferError if a device has failed.

    Args:
        every: one page in `every` is sampled. 0: none.
        compared: bytes of a page to compare with nodes that have another number of ranks.
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
        """Sample some of these pages. Returns (index in `pages`, checksum) of each, in order.

        Args:
            spans: tables of the pages, see ExposePages.
            consumer: ranks of the consumer. None: as this node.
        """
        if not self._every:
            return ()
        places = []
        place = self._skip
        while place < len(pages):
            places.append(place)
            place += self._gap() + 1
        self._skip = place - len(pages)
        if not places:
            return ()
        tables = tables_of(spans, len(pages))
        cuts = {place: self._compared.served(consumer, tables[place]) for place in places}
        places = [place for place in places if cuts[place] != ()]
        sums = self._of([pages[place] for place in places], [cuts[place] for place in places])
        return tuple(zip(places, sums, strict=True))

    def wrong(self, expected: Sequence[PageSum], producer: NodeShape | None = None) -> list[int]:
        """Return the pages whose checksum differs from the expected one. The pages must be in
        range.

        Args:
            producer: ranks of the producer. None: as this node.
        """
        cuts = [self._compared.read(producer, each.table) for each in expected]
        sums = self._of([each.page for each in expected], cuts)
        return [
            each.page for each, found in zip(expected, sums, strict=True) if found != each.checksum
        ]

    def _of(self, pages: Sequence[int], cuts: Sequence[Cuts | None]) -> list[int]:
        """Return the 64-bit XXH3 checksum of the current bytes of each page."""
        contents = self._pages.each(pages)
        return [_checksum(*each) for each in zip(contents, cuts, strict=True)]

    def _gap(self) -> int:
        """Return the number of pages to skip before the next sample, random with the set mean."""
        return random.randrange(2 * self._every - 1) if self._every else 0
