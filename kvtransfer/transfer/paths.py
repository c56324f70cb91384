"""The data paths of a node or of one of its ranks: links to producers, offers to consumers, and the
bytes that checksums cover. Independent of what carries the pages.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from common.copy_map import NodeShape, RankPages, Slice, copy_map
from common.errors import LayoutMismatch
from kvtransfer.backends.base import Ints
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import PIECES, STATE
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
