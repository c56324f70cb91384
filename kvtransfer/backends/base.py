"""The contract of a data path and its types. Conformance tests are in tests/kvtransfer.

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
        raise LayoutMismatch(f"no memory is like {remote}")


def check_pages(source: Ints, num_source: int, destination: Ints, num_destination: int) -> None:
    """Raise ReadRefused if the producer has no such page, EngineFault if this node has none."""
    if (wrong := first_outside(source, num_source)) is not None:
        raise ReadRefused(f"page {wrong} is not one of the producer's {num_source}")
    if (wrong := first_outside(destination, num_destination)) is not None:
        raise EngineFault(f"page {wrong} is not one of this node's {num_destination}")


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
