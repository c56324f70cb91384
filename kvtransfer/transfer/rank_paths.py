"""The data paths of one rank: serves its pages, and reads from the ranks of a producer.

A node with one rank uses these directly. With several ranks, node_paths.py joins the paths of all.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

from common.config import TransferConfig
from common.copy_map import NodeShape, Slice
from common.errors import LayoutMismatch, TransferError
from common.logs import ThrottledLog
from kernels.cpu import memory
from kvtransfer import data_paths
from kvtransfer.backends.base import (
    BackendConnection,
    Ints,
    PagePool,
    PageProducer,
    PublishedPages,
    TableSlices,
    TransferBackend,
    check_pool,
)
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.transfer.link import Link, LinkBytes, LinkLimits, Notify, PageLink
from kvtransfer.transfer.link_group import LinkGroup
from kvtransfer.transfer.paths import (
    MOST_KNOWN,
    ComparedBytes,
    PagesByRank,
    TransferPaths,
    map_of,
)

_log = ThrottledLog(logging.getLogger(__name__))


class RankOffers:
    """The paths over which one rank is read.

    Args:
        serve: returns the producers by backend, in the order in which consumers try them. Raises
            ConfigError if no backend is usable.
    """

    def __init__(self, rank: int, serve: Callable[[], Mapping[str, PageProducer]]) -> None:
        self._rank = rank
        self._serve = serve
        self._producers = serve()

    def prepare(self, consumer: int) -> Sequence[Future[Any]]:
        return [producer.prepare(consumer) for producer in self._producers.values()]

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        paths = []
        for name, producer in self._producers.items():
            try:
                paths.append(DataPath(name, producer.admit(consumer), self._rank))
            except TransferError as error:
                _log.warning("data path not offered", path=name, stream=consumer, reason=error)
        return tuple(paths)

    def dismiss(self, consumer: int) -> None:
        for producer in self._producers.values():
            producer.dismiss(consumer)

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        for published in self._publications():
            published.publish(consumer, pages)
        return ()

    def withdraw(self, consumer: int, pages: Ints) -> None:
        for published in self._publications():
            published.withdraw(consumer, pages)

    def poll(self) -> None:
        for producer in self._producers.values():
            producer.poll()

    def close(self) -> Sequence[Future[Any]]:
        for producer in self._producers.values():
            producer.close()
        return ()

    def open(self) -> Sequence[Future[Any]]:
        self._producers = self._serve()
        return ()

    def _publications(self) -> Iterator[PublishedPages]:
        for producer in self._producers.values():
            if producer.publications is not None:
                yield producer.publications


class RankLinks:
    """Opens links of one rank.

    Args:
        rank, node: this rank, and the ranks of its node.
    """

    def __init__(
        self,
        rank: int,
        node: NodeShape,
        pool: PagePool,
        backends: Mapping[str, TransferBackend],
        config: TransferConfig,
        pages_by_rank: PagesByRank,
    ) -> None:
        self._rank = rank
        self._node = node
        self._pool = pool
        self._backends = backends
        self._config = config
        # Cached, so that a producer that reconnects often costs the computation only once.
        self._pages_by_rank = lru_cache(MOST_KNOWN)(pages_by_rank)
        self._slices = lru_cache(MOST_KNOWN)(self._computed_slices)

    def check(self, hello: PairHello) -> None:
        for region in hello.regions:
            check_pool(region)
        if hello.shape == self._node:
            return  # `compare` has found equal pages
        for rank, pages in enumerate(self._pages_by_rank(hello.shape)):
            there = hello.regions[rank].page_bytes, hello.state_pages
            if there != (pages.page_bytes, pages.state_pages):
                raise LayoutMismatch(
                    f"{hello.peer} cannot pair: rank {rank} of {len(hello.regions)} has pages of "
                    f"{there[0]} bytes and a state of {there[1]} pages there, where this node "
                    f"expects {pages.page_bytes} and {pages.state_pages}."
                )
        self._slices(hello.shape)

    def open(self, hello: PairHello, backend: str, notify: Notify) -> PageLink:
        members = [
            (producer, LinkBytes(self._pool.page_bytes, slices))
            for producer, slices in self._slices(hello.shape).items()
        ]
        makers = [partial(self._link, hello, backend, *member) for member in members]
        if len(makers) == 1:
            return makers[0](notify)
        shares = [num_bytes.of_a_page for _, num_bytes in members]
        return LinkGroup(hello.instance, makers, notify, shares=shares)

    def _computed_slices(self, producer: NodeShape) -> Mapping[int, TableSlices | None]:
        """Return the byte ranges that this rank reads, by rank of the producer. Rank 0 reads pieces
        of weights from rank 0.
        """
        if producer == self._node:
            return {self._rank: None}
        mine = self._pages_by_rank(self._node)[self._rank]
        whole = map_of(self._rank, mine, self._pages_by_rank(producer))
        by_producer: dict[int, tuple[list[Slice], ...]] = {}
        for table, slices in enumerate(whole):
            for each in slices:
                own = by_producer.setdefault(each.producer_rank, tuple([] for _ in whole))
                own[table].append(each)
        return dict(sorted(by_producer.items()))

    def _link(
        self, hello: PairHello, backend: str, producer: int, num_bytes: LinkBytes, notify: Notify
    ) -> PageLink:
        return Link(
            hello.instance,
            lambda: self._connect(hello, backend, producer, num_bytes.slices),
            notify,
            num_bytes=num_bytes,
            limits=LinkLimits(self._config.read_timeout_s, self._config.min_link_gib_per_s),
            ranks=(self._rank, producer),
            take_memory=self._take_memory,
        )

    def _connect(
        self, hello: PairHello, backend: str, producer: int, slices: TableSlices | None
    ) -> BackendConnection:
        """Connect to a rank of a producer. Called on a link's thread."""
        path = next((p for p in hello.paths if (p.backend, p.rank) == (backend, producer)), None)
        if path is None:
            raise TransferError("the producer offers no data path that this node can use")
        remote = hello.regions[producer]
        return self._backends[backend].connect(path.description, remote, self._pool, slices)

    def _take_memory(self, page: int) -> None:
        """Make the system allocate a page's memory. Called on a link's thread."""
        if self._pool.device == "cpu":
            memory.take(self._pool.base + page * self._pool.page_bytes, self._pool.page_bytes)


def paths_of_rank(
    rank: int,
    node: NodeShape,
    pool: PagePool,
    config: TransferConfig,
    backends: Mapping[str, TransferBackend],
    pages_by_rank: PagesByRank,
    instance: int,
) -> TransferPaths:
    """Serve the pages of one rank.

    Raises:
        ConfigError: this machine supports none of the backends.
    """
    return TransferPaths(
        RankLinks(rank, node, pool, backends, config, pages_by_rank),
        RankOffers(rank, partial(data_paths.serve, backends, pool, instance)),
        tuple(backends),
        ComparedBytes(node, pages_by_rank),
    )
