"""The contract of a data path, its types, and the bytes that a connection reads. Conformance tests
are in tests/kvtransfer.

A PageProducer serves reads of its pool. A Connection reads from one producer into the local pool.
One user thread (the link's) uses a BackendConnection and blocks in `copy`. Any other thread may
`stop` it.
"""

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
# Of one producer: by table, of pieces of weights, of the state.
Moves: TypeAlias = Sequence[Sequence[Slice]]
Parsed = TypeVar("Parsed")

CONNECT_S = 5.0  # longest `TransferBackend.connect`
_MAX_ADDRESS = 1 << 57
_MAX_PAGES = 1 << 31  # page ids are int32
_FEW = 16  # largest number of pages for which a Python loop is faster than numpy
PROBE_BYTES = 4 << 20  # read by one `BackendConnection.probe`, rounded to whole pages


class ReadRefused(TransferError):
    """The producer does not publish a page of this copy to this consumer, or no longer does. No
    more of the copy will land, and the connection stays usable.
    """


@dataclass(frozen=True, slots=True)
class PagePool:
    """Registered memory in this process: page i is [base + i * page_bytes, + page_bytes).

    The memory stays mapped for as long as any producer or connection made with it is open. `device`
    is "cpu" or "cuda:N". All memory of a device pool is one allocation that other processes may
    map, as made by cudaMalloc.
    """

    base: int
    page_bytes: int
    num_pages: int
    device: str


@dataclass(frozen=True, slots=True)
class RemotePool:
    """A producer's pool, as its Hello describes it. It is trusted only after a range check."""

    base: int
    page_bytes: int
    num_pages: int


class PageCut(NamedTuple):
    """Bytes [at, at + size) of every page of a pool."""

    at: int
    size: int


def parse_description(backend: str, description: bytes, kind: type[Parsed]) -> Parsed:
    """Decode a backend's description. Raises TransferError if it is invalid for that backend."""
    try:
        return msgspec.msgpack.decode(description, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not a description of {backend}: {error}") from None


def check_pool(remote: RemotePool) -> None:
    """Raise LayoutMismatch if no memory can be like `remote`."""
    end = remote.base + remote.page_bytes * remote.num_pages
    if not (0 < remote.base < end < _MAX_ADDRESS and remote.num_pages <= _MAX_PAGES):
        raise LayoutMismatch(f"the memory region is invalid: {remote}")


def check_pages(source: Ints, num_source: int, destination: Ints, num_destination: int) -> None:
    """Raise ReadRefused if the producer has no such page, EngineFault if this node has none."""
    if (wrong := first_outside(source, num_source)) is not None:
        raise ReadRefused(f"the producer has no page {wrong}, only {num_source} pages")
    if (wrong := first_outside(destination, num_destination)) is not None:
        raise EngineFault(f"this node has no page {wrong}, only {num_destination} pages")


def first_outside(pages: Ints, num_pages: int) -> int | None:
    """Return the first page outside [0, num_pages), or None."""
    if len(pages) <= _FEW:
        return next((page for page in pages.tolist() if not 0 <= page < num_pages), None)
    if np.maximum.reduce(pages.view(np.uint32)) < num_pages:
        return None  # the usual case in one pass: as uint32, a negative page is huge
    return int(pages[(pages < 0) | (pages >= num_pages)][0])


def prepared() -> Future[Any]:
    """Return a completed Future, for a `PageProducer.prepare` that needs no time."""
    done: Future[Any] = Future()
    done.set_result(None)
    return done


class PageProducer(Protocol):
    """Serves reads of one pool to any number of consumers.

    A consumer is one pair stream, identified by a number that is never reused: a node that pairs
    again is a new consumer. Everything created for a consumer belongs to it alone and ends with it.
    """

    def prepare(self, consumer: int) -> Future[Any]:
        """Start work for this consumer alone that may take longer than `admit` may. Called at most
        once for each consumer. The Future completes when the work has ended, successfully or not.
        """
        ...

    def admit(self, consumer: int) -> bytes:
        """Return the description with which this consumer connects, valid until it is dismissed. It
        covers what has been prepared so far, is opaque to everything but the same backend's
        `connect`, and may contain a key for this consumer alone.

        Raises:
            TransferError: there is nothing for this consumer.
        """
        ...

    def dismiss(self, consumer: int) -> None:
        """End everything that `prepare` and `admit` started: the consumer's publications are
        removed, its connections end, and it cannot connect again. Never blocks, idempotent. On a
        path without keys, a one-sided backend can do nothing here: a consumer that received
        addresses still has them.
        """
        ...

    def publish(self, consumer: int, pages: Ints) -> None:
        """Allow an admitted consumer to read these pages. Counted: a page published twice is
        readable until it is withdrawn twice. A one-sided backend has nothing to do here.
        """
        ...

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Undo one `publish` of each of these pages for an admitted consumer. Never waits for a
        read in progress.
        """
        ...

    def poll(self) -> None:
        """Make progress for backends whose consumers need the producer's help to connect. Called
        about every millisecond while a consumer is connecting, and at no other time.
        """
        ...

    def close(self) -> None:
        """Stop serving all consumers. The pool may be unmapped afterwards. Idempotent."""
        ...


class BackendConnection(Protocol):
    """One consumer's access to one producer instance."""

    @property
    def path(self) -> str:
        """Name what carries the bytes: nvlink | cuda_ipc | rdma | cma | tcp."""
        ...

    def probe(self) -> float:
        """Read about PROBE_BYTES of the producer's scratch pages and return the rate in GiB/s.
        Blocks and can be stopped like `copy`, and runs on the same thread. Touches no page of
        either pool.

        Raises:
            TransferError: as for `copy`.
        """
        ...

    def copy(self, source_pages: Ints, destination_pages: Ints, table: int = 0) -> None:
        """Read pages of a table as the connection's map says: the producer's source_pages[i] into
        the local destination_pages[i]. The table after the last one is the state, whose pages are
        all given. Blocks until every byte has landed.

        Raises:
            ReadRefused: a source page is not published to this consumer. The destination pages hold
                garbage, nothing more will land in them, and other copies may follow.
            TransferError: the content of the destination pages is unknown. The connection is dead
                and only `stop` and `close` may follow.
        """
        ...

    def stop(self) -> None:
        """Make a `copy` in progress, and every later one, raise soon. Any thread, also after
        `close`. Idempotent. Never blocks.
        """
        ...

    def close(self) -> None:
        """Close the connection. After it returns no byte lands. User thread only, outside `copy`.
        Idempotent.
        """
        ...


class TransferBackend(Protocol):
    """One kind of data path."""

    @property
    def name(self) -> str: ...

    def serve(self, pool: PagePool, instance: int) -> PageProducer:
        """Serve `pool`. Raises TransferError if this machine cannot serve over this backend."""
        ...

    def connect(
        self,
        description: bytes,
        remote: RemotePool,
        pool: PagePool,
        moves: Moves | None = None,
    ) -> BackendConnection:
        """Connect to the producer that `description` names, as the consumer that it was made for,
        and *prove* the path before returning. Blocks for at most 5 s.

        Args:
            moves: the bytes to read, see ReadMap. None: whole pages.
        Raises:
            TransferError: there is no such path from here. The message has the reason, and the
                caller tries the next backend.
        """
        ...


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
    """The bytes that one connection reads of the pages that it is given.

    A map has slices by table, and of the state after the last table (common/copy_map.py). Each page
    of a table is read into one page. The pages of the state are two lists, whose lengths may
    differ. Equal slices are one part, whatever their tables and pages, so that a backend can
    prepare it once.
    """

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
                raise LayoutMismatch(
                    f"a slice of {size} bytes from {source} to {at} of a page is invalid"
                )
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
