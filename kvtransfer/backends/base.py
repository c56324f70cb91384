"""The interface of a data-path backend, its types, and `ReadMap`, the bytes that a connection
reads. Every backend passes the conformance tests in tests/kvtransfer.

A `PageProducer` serves reads of its own pool. If it takes part in reads, it serves only pages that
are published to the consumer (`PublishedPages`). A `BackendConnection` reads from one producer into
the local pool. One thread (the link's) uses a connection and blocks in `copy`. Any other thread may
call `stop`.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.copy_map import Slice
from common.errors import EngineFault, LayoutMismatch, TransferError

Ints = NDArray[np.int32]
# Slices to read from one producer: for each table, then for weight pieces, then for the state.
TableSlices: TypeAlias = Sequence[Sequence[Slice]]
Parsed = TypeVar("Parsed")

CONNECT_S = 5.0  # longest duration of `TransferBackend.connect`
_MAX_ADDRESS = 1 << 57
_MAX_PAGES = 1 << 31  # page ids are int32
_FEW = 16  # largest number of pages for which a Python loop is faster than numpy
PROBE_BYTES = 4 << 20  # bytes that one `BackendConnection.probe` reads, rounded to whole pages


class ReadRefused(TransferError):
    """The producer does not, or no longer, publish a requested page to this consumer. No more bytes
    of this copy arrive. The connection stays usable.
    """


class PoolRegion(msgspec.Struct, frozen=True):
    """The pages of one rank, as its node describes them in Hello. Page i begins at
    base + i * page_bytes. A peer's region is not trusted before `check_pool`.
    """

    base: int
    page_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class PagePool:
    """Registered memory of this process. Page i begins at base + i * page_bytes.

    The memory stays mapped as long as a producer or connection that uses it is open. `device` is
    "cpu" or "cuda:N". Device memory is one cudaMalloc allocation, which other processes may map.
    """

    base: int
    page_bytes: int
    num_pages: int
    device: str

    @property
    def region(self) -> PoolRegion:
        return PoolRegion(self.base, self.page_bytes, self.num_pages)


class PageCut(NamedTuple):
    """The bytes [at, at + size) of every page of a pool."""

    at: int
    size: int


def parse_description(backend: str, description: bytes, kind: type[Parsed]) -> Parsed:
    """Decode a backend's description. Raises TransferError if it is invalid."""
    try:
        return msgspec.msgpack.decode(description, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not a description of {backend}: {error}") from None


def check_pool(remote: PoolRegion) -> None:
    """Raise LayoutMismatch if the address range or the page count of `remote` is impossible."""
    end = remote.base + remote.page_bytes * remote.num_pages
    if not (0 < remote.base < end < _MAX_ADDRESS and remote.num_pages <= _MAX_PAGES):
        raise LayoutMismatch(f"the memory region is invalid: {remote}")


def check_pages(source: Ints, num_source: int, destination: Ints, num_destination: int) -> None:
    """Check page ids before a read.

    Raises:
        ReadRefused: a source page is outside the producer's pool.
        EngineFault: a destination page is outside the local pool.
    """
    if (wrong := first_outside(source, num_source)) is not None:
        raise ReadRefused(f"the producer has no page {wrong}, only {num_source} pages")
    if (wrong := first_outside(destination, num_destination)) is not None:
        raise EngineFault(f"this node has no page {wrong}, only {num_destination} pages")


def first_outside(pages: Ints, num_pages: int) -> int | None:
    """Return the first page outside [0, num_pages), or None."""
    if len(pages) <= _FEW:
        return next((page for page in pages.tolist() if not 0 <= page < num_pages), None)
    if np.maximum.reduce(pages.view(np.uint32)) < num_pages:
        return None  # one pass in the usual case: as uint32, a negative id is huge
    return int(pages[(pages < 0) | (pages >= num_pages)][0])


def prepared() -> Future[Any]:
    """Return a completed Future, for a `PageProducer.prepare` that has nothing to do."""
    done: Future[Any] = Future()
    done.set_result(None)
    return done


class PublishedPages:
    """Counts how often each page is published to each consumer. For any thread. Costs 4 bytes per
    page for each consumer with publications.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._counts: dict[int, Ints] = {}
        self._totals: dict[int, int] = {}
        self._lock = threading.Lock()

    def publish(self, consumer: int, pages: Ints) -> None:
        """Allow a consumer to read these pages. A page published twice must be withdrawn twice.
        Pages are distinct within a call.
        """
        with self._lock:
            if consumer not in self._counts:
                self._counts[consumer] = np.zeros(self._num_pages, np.int32)
                self._totals[consumer] = 0
            self._counts[consumer][pages] += 1
            self._totals[consumer] += len(pages)

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Undo one `publish` of each of these pages. Does not wait for reads in progress. Pages are
        distinct within a call.

        Raises:
            EngineFault: a page is not published to this consumer.
        """
        with self._lock:
            if not len(pages):
                return
            counts = self._counts.get(consumer)
            if counts is None or bool((counts[pages] < 1).any()):
                raise EngineFault(f"withdrew pages that were not published to consumer {consumer}")
            counts[pages] -= 1
            self._totals[consumer] -= len(pages)
            if not self._totals[consumer]:
                del self._counts[consumer], self._totals[consumer]

    def forget(self, consumer: int) -> None:
        with self._lock:
            self._counts.pop(consumer, None)
            self._totals.pop(consumer, None)

    def first_refused(self, consumer: int, pages: Ints) -> int | None:
        """Return the first page that this consumer may not read now, or None."""
        if not len(pages):
            return None
        if (outside := first_outside(pages, self._num_pages)) is not None:
            return outside
        with self._lock:
            counts = self._counts.get(consumer)
            if counts is None:
                return int(pages[0])
            counted = counts.take(pages)
        if np.minimum.reduce(counted) > 0:
            return None
        return int(pages[counted < 1][0])


class PageProducer(Protocol):
    """The producer's end of a data path: serves reads of one pool to any number of consumers.

    A consumer is one pair stream, identified by a number that is never reused. A node that pairs
    again is a new consumer. All resources created for a consumer are released when it is dismissed.
    """

    @property
    def publications(self) -> PublishedPages | None:
        """The pages that each admitted consumer may read. None: a one-sided backend, whose reads do
        not involve the producer.
        """
        ...

    def prepare(self, consumer: int) -> Future[Any]:
        """Start preparations for this consumer that are too slow for `admit`. Called at most once
        per consumer. The Future completes when they end, successfully or not.
        """
        ...

    def admit(self, consumer: int) -> bytes:
        """Return the description that this consumer passes to `TransferBackend.connect` of the same
        backend. It covers what has been prepared so far, may contain a key for this consumer only,
        and is valid until `dismiss`.

        Raises:
            TransferError: this backend offers this consumer no path.
        """
        ...

    def dismiss(self, consumer: int) -> None:
        """Revoke everything that `prepare` and `admit` set up: publications, open connections, and
        the right to connect. Never blocks. Idempotent. A one-sided backend without keys cannot
        revoke anything, because the consumer still knows the addresses.
        """
        ...

    def poll(self) -> None:
        """Make progress on connection set-up, for backends that need the producer's help in it.
        Called about every millisecond while a consumer connects, and at no other time.
        """
        ...

    def close(self) -> None:
        """Stop serving all consumers. Afterwards the pool may be unmapped. Idempotent."""
        ...


class BackendConnection(Protocol):
    """One consumer's connection to one producer process."""

    @property
    def path(self) -> str:
        """Name of the data path: nvlink | cuda_ipc | rdma | cma | tcp."""
        ...

    def probe(self) -> float:
        """Read about PROBE_BYTES of the producer's scratch pages and return the rate in GiB/s. Uses
        no page of either pool. Blocks, runs on the same thread as `copy`, and `stop` interrupts it.

        Raises:
            TransferError: as for `copy`.
        """
        ...

    def copy(self, source_pages: Ints, destination_pages: Ints, table: int = 0) -> None:
        """Read the producer's source_pages[i] into the local destination_pages[i], in the byte
        ranges of the connection's ReadMap. Blocks until every byte has arrived.

        Args:
            table: index of a page table. The index after the last table means the recurrent state,
                all of whose pages must be given.
        Raises:
            ReadRefused: a source page is not published to this consumer. The destination pages hold
                garbage, no more bytes arrive in them, and the connection stays usable.
            TransferError: the connection has failed. The content of the destination pages is
                unknown, and only `stop` and `close` may follow.
        """
        ...

    def stop(self) -> None:
        """Make a `copy` in progress, and every later one, raise soon. Never blocks. Any thread may
        call it, also after `close`. Idempotent.
        """
        ...

    def close(self) -> None:
        """Close the connection. After it returns, no more bytes arrive. Only the thread that copies
        may call it, outside `copy`. Idempotent.
        """
        ...


class TransferBackend(Protocol):
    """One kind of data path, such as tcp, for both producers and consumers."""

    @property
    def name(self) -> str: ...

    def serve(self, pool: PagePool, instance: int) -> PageProducer:
        """Serve `pool`. Raises TransferError if this machine does not support this backend."""
        ...

    def connect(
        self,
        description: bytes,
        remote: PoolRegion,
        pool: PagePool,
        slices: TableSlices | None = None,
    ) -> BackendConnection:
        """Connect to the producer that made `description` for this consumer, and prove that the
        path works before returning. Blocks for at most CONNECT_S seconds.

        Args:
            slices: byte ranges to read, see ReadMap. None: whole pages.
        Raises:
            TransferError: this path does not work from here, for the reason in the message. The
                caller tries the next backend.
        """
        ...


class PagePart(NamedTuple):
    """A byte range to read: [source, source + size) of a source page, to offset `at` of a local
    one.
    """

    source: int
    at: int
    size: int


class PartRead(NamedTuple):
    """A read of one byte range: of page source[i] into page destination[i]."""

    part: int  # index in ReadMap.parts
    source_pages: Ints
    destination_pages: Ints


class _StatePart(NamedTuple):
    part: int
    source: Ints  # indices into the pages of the state
    destination: Ints


class ReadMap:
    """The byte ranges that one connection reads for each table and for the recurrent state.

    The slices come from common/copy_map.py, which is needed when the two nodes have different
    numbers of ranks. Each page of a table is read into one page. The state has two page lists,
    which may differ in length. Equal slices of different tables share one entry of `parts`, so that
    a backend prepares it only once.
    """

    def __init__(
        self, remote: PoolRegion, pool: PagePool, slices: TableSlices | None = None
    ) -> None:
        """
        Args:
            slices: slices of each table, then of the state. None: whole pages.
        Raises:
            LayoutMismatch: the slices do not fit into the pages, or whole pages differ in size.
        """
        check_pool(remote)
        if slices is None:
            if remote.page_bytes != pool.page_bytes:
                raise LayoutMismatch(
                    f"a page is {remote.page_bytes} bytes at the producer, {pool.page_bytes} here"
                )
            slices = ((Slice(0, 0, 0, 0, 0, pool.page_bytes),), ())
        numbers: dict[PagePart, int] = {}
        for _, source_page, source, page, at, size in (each for table in slices for each in table):
            if min(source_page, source, page, at, size - 1) < 0:
                raise LayoutMismatch(
                    f"a slice of {size} bytes from {source} to {at} of a page is invalid"
                )
            if source + size > remote.page_bytes or at + size > pool.page_bytes:
                raise LayoutMismatch(
                    f"{size} bytes at {source} and at {at} are outside pages of "
                    f"{remote.page_bytes} bytes at the producer and {pool.page_bytes} here"
                )
            numbers.setdefault(PagePart(source, at, size), len(numbers))
        *tables, state = slices
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
        """Return the reads for these pages of a table, or for all pages of the state.

        Raises:
            ReadRefused: a source page is outside the producer's pool.
            EngineFault: a destination page is outside the local pool, or the lists do not fit the
                map.
        """
        if table < len(self._tables):
            if len(source) != len(destination):
                raise EngineFault(f"{len(source)} pages cannot be read into {len(destination)}")
            check_pages(source, self._num_source, destination, self._num_destination)
            return [PartRead(part, source, destination) for part in self._tables[table]]
        if len(source) < self._state_pages[0] or len(destination) < self._state_pages[1]:
            raise EngineFault(
                f"a state needs {self._state_pages} pages, got {len(source)} and {len(destination)}"
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
