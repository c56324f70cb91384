"""The data paths of a node or of one of its ranks: links to producers, offers to consumers, and the
checksums of pages. Independent of what carries the pages.

Checksums of sampled pages are computed on publication and compared after the read. They find errors
that no protocol can: a byte changed by a network, a driver or a device. The sample is random, so
that a recurring error is found eventually.
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
Cuts: TypeAlias = tuple[tuple[int, int], ...]  # of a page: begin and size

MOST_KNOWN = 8  # shapes of producers


class PathOffers(Protocol):
    """The data paths over which consumers read the pages of a node, or of one rank. See
    PageProducer. For the transfer thread, and without consumers for another one: one at a time.
    """

    def prepare(self, consumer: int) -> Sequence[Future[Any]]: ...

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        """Return the paths of a consumer, in the order in which it should try them."""
        ...

    def dismiss(self, consumer: int) -> None: ...

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        """Let a consumer read pages. It may when all futures are done."""
        ...

    def withdraw(self, consumer: int, pages: Ints) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> Sequence[Future[Any]]:
        """Serve no more. When all futures are done, nothing of the paths refers to the pages."""
        ...

    def open(self) -> Sequence[Future[Any]]:
        """Serve again after `close`, at the same addresses, when all futures are done. Blocks while
        the pages are registered. Raises ConfigError if no path can be served."""
        ...


class LinkOpener(Protocol):
    """Opens links to producers, for a node or for one rank."""

    def check(self, hello: PairHello) -> None:
        """Raise LayoutMismatch if the pages of a producer cannot be read."""
        ...

    def open(self, hello: PairHello, backend: str, notify: Notify) -> PageLink:
        """Open a link to a producer over one backend. If it offers none, the link closes at
        once."""
        ...


class ComparedBytes:
    """The bytes of pages that two nodes with different numbers of ranks compare by checksums. They
    are those that rank 0 of the consumer reads from rank 0 of the producer, in the order of its
    map.

    Args:
        node: the ranks of this node.
    """

    def __init__(self, node: NodeShape, pages_by_rank: PagesByRank) -> None:
        self._node = node
        self._pages_by_rank = pages_by_rank
        self._slices = lru_cache(MOST_KNOWN)(self._computed)

    def served(self, consumer: NodeShape | None, table: int) -> Cuts | None:
        """Return the compared bytes of a page of a table, which another node reads. None: the whole
        page. There are none of the state.
        """
        if consumer is None or consumer == self._node:
            return None
        return tuple((each.source, each.size) for each in self._slices(consumer, self._node)[table])

    def read(self, producer: NodeShape | None, table: int) -> Cuts | None:
        """Return the same of a page that this node has read."""
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
    """Return what a rank reads: by table, of pieces of weights, of the state."""
    piece = Slice(0, 0, 0, 0, 0, min(mine.page_bytes, producers[0].page_bytes))
    *tables, state = copy_map(rank, mine, producers)
    return (*tables, () if rank else (piece,), state)


@dataclass(frozen=True, slots=True)
class TransferPaths:
    """All data paths of a node, or of one rank.

    Attributes:
        backends: names of those over which it may read.
        compared: the bytes that checksums cover.
    """

    opener: LinkOpener
    offers: PathOffers
    backends: Collection[str]
    compared: ComparedBytes


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
        if not places:
            return ()
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
