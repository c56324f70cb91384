"""The contract of a data path, and the words of it. conformance tests: tests/kvtransfer.

An Owner serves reads of its pool. A Connection reads from one owner into the local pool; it has
one user thread (the link's), which blocks in `copy`; any other thread may `stop` it.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFault, LayoutMismatch, TransferError

Ints = NDArray[np.int32]
Parsed = TypeVar("Parsed")

CONNECT_S = 5.0  # longest `Backend.connect`
_MAX_ADDRESS = 1 << 57
_MAX_PAGES = 1 << 31  # page ids are int32
_FEW = 16  # pages that Python looks through before numpy has begun
PROBE_BYTES = 4 << 20  # read by one `Connection.probe`, rounded to whole pages


class ReadRefused(TransferError):
    """The owner does not publish a page of this copy to this reader (any more). Nothing more of
    the copy will land, and the connection lives."""


@dataclass(frozen=True, slots=True)
class PagePool:
    """Registered memory in this process: page i is [base + i * page_bytes, + page_bytes).

    The memory stays mapped for as long as any owner or connection made with it is open.
    device is "cpu" or "cuda:N"; all of a device's memory is one allocation that other processes
    may map, as cudaMalloc makes it.
    """

    base: int
    page_bytes: int
    num_pages: int
    device: str


@dataclass(frozen=True, slots=True)
class RemotePool:
    """An owner's pool, as its Hello told it. Never trusted further than a range check."""

    base: int
    page_bytes: int
    num_pages: int


def parse_description(backend: str, description: bytes, kind: type[Parsed]) -> Parsed:
    """Raises TransferError where it is not one of that backend's."""
    try:
        return msgspec.msgpack.decode(description, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not a description of {backend}: {error}") from None


def check_pool(remote: RemotePool, pool: PagePool) -> None:
    """Raises LayoutMismatch where pages of `remote` cannot be pages of `pool`."""
    end = remote.base + remote.page_bytes * remote.num_pages
    if not (0 < remote.base < end < _MAX_ADDRESS and remote.num_pages <= _MAX_PAGES):
        raise LayoutMismatch(f"no memory is like {remote}")
    if remote.page_bytes != pool.page_bytes:
        raise LayoutMismatch(
            f"a page is {remote.page_bytes} bytes at the owner and {pool.page_bytes} here"
        )


def check_pages(source: Ints, num_source: int, destination: Ints, num_destination: int) -> None:
    """Raises ReadRefused where the owner has no such page, EngineFault where this node has not."""
    if len(source) != len(destination):
        raise EngineFault(f"{len(source)} pages cannot be read into {len(destination)}")
    if (wrong := first_outside(source, num_source)) is not None:
        raise ReadRefused(f"page {wrong} is not one of the owner's {num_source}")
    if (wrong := first_outside(destination, num_destination)) is not None:
        raise EngineFault(f"page {wrong} is not one of this node's {num_destination}")


def first_outside(pages: Ints, num_pages: int) -> int | None:
    """The first page that is not in [0, num_pages)."""
    if len(pages) <= _FEW:
        return next((page for page in pages.tolist() if not 0 <= page < num_pages), None)
    if np.maximum.reduce(pages.view(np.uint32)) < num_pages:
        return None  # the usual case in one pass: a negative page is a huge one
    return int(pages[(pages < 0) | (pages >= num_pages)][0])


def prepared() -> Future[Any]:
    """What `Owner.prepare` returns where nothing takes time."""
    done: Future[Any] = Future()
    done.set_result(None)
    return done


class Owner(Protocol):
    """Serves reads of one pool to any number of readers.

    A reader is one pair stream, by a number that is never used again: a node that pairs anew is
    another reader. What it is given here is its own, and ends with it.
    """

    def prepare(self, reader: int) -> Future[Any]:
        """Begins what is to be this reader's alone and takes longer than `admit` may. Called at
        most once of a reader. Done when there is no more to wait for, whatever has come of it."""
        ...

    def admit(self, reader: int) -> bytes:
        """What this reader needs to connect, until it is dismissed, as far as it has been
        prepared; opaque to everyone but the same backend's `connect`. May hold a key that is this
        reader's alone.

        Raises:
            TransferError: there is nothing for this reader.
        """
        ...

    def dismiss(self, reader: int) -> None:
        """Ends what `prepare` and `admit` have begun: its publications are gone, its connections
        end, and it cannot connect again. Never waits; idempotent. On a path without keys a
        one-sided backend can do nothing here: who has been told where memory is still knows it."""
        ...

    def publish(self, reader: int, pages: Ints) -> None:
        """Allows a reader that is admitted to read these pages. Counted: a page published twice
        is readable until withdrawn twice. A one-sided backend has nothing to do here."""
        ...

    def withdraw(self, reader: int, pages: Ints) -> None:
        """Takes one `publish` of each of these pages back, of a reader that is admitted. Never
        waits for a read under way."""
        ...

    def poll(self) -> None:
        """Called about every millisecond while a reader is connecting, and not otherwise: for
        backends whose readers need the owner's help to connect."""
        ...

    def close(self) -> None:
        """Serves nobody any more; the pool may be unmapped after it. Idempotent."""
        ...


class Connection(Protocol):
    """One reader's access to one owner instance."""

    @property
    def path(self) -> str:
        """What carries the bytes: nvlink | cuda_ipc | rdma | cma | tcp | loopback."""
        ...

    def probe(self) -> float:
        """Reads about PROBE_BYTES of the owner's scratch pages and returns the rate in GiB/s.
        Blocks, and is stopped, like `copy`, and by the same thread. Touches no page of either
        pool.

        Raises:
            TransferError: as for `copy`.
        """
        ...

    def copy(self, source_pages: Ints, destination_pages: Ints) -> None:
        """Reads the owner's source_pages[i] into the local destination_pages[i]. Blocks until
        every byte has landed.

        Raises:
            ReadRefused: a source page is not published to this reader. The destination pages
                hold rubbish, nothing more will land in them, and other copies may follow.
            TransferError: nothing is known of the destination pages; the connection is dead and
                only `stop` and `close` may follow.
        """
        ...

    def stop(self) -> None:
        """Makes a `copy` under way, and every later one, raise soon. Any thread, also after
        `close`; idempotent; never blocks."""
        ...

    def close(self) -> None:
        """After it returns no byte lands. Called by the user thread, outside `copy`; idempotent."""
        ...


class Backend(Protocol):
    """One kind of data path."""

    @property
    def name(self) -> str: ...

    def serve(self, pool: PagePool, instance: int) -> Owner:
        """Raises TransferError where this machine cannot serve over this backend."""
        ...

    def connect(self, description: bytes, remote: RemotePool, pool: PagePool) -> Connection:
        """Connects to the owner that `description` names, as the reader that it was made for, and
        *proves* the path before it returns. Blocks for at most 5 s.

        Raises:
            TransferError: no such path from here, with the reason; try the next backend.
        """
        ...
