"""Transfer of pages between a pool and a socket: the interface, and its implementation for host
memory.

Host memory is sent and received in place. staging.py implements the interface for device memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

from kvtransfer.backends.base import Ints, PageCut, PagePool
from kvtransfer.backends.scatter import PageTable, Vectors
from kvtransfer.backends.scratch import ReadScratch
from kvtransfer.backends.tcp.wire import FrameKind

# Returns the iovecs of a head and of the pages after it. Blocks until the pages are in host memory.
# The head must live as long as the iovecs are used.
Load: TypeAlias = Callable[[bytearray], Vectors]


class SendBuffers(Protocol):
    """The sending side of one connection: pages on their way into the socket. Not thread-safe."""

    num_ahead: int  # loads that may be started before an earlier one is sent

    def begin(self, kind: FrameKind, pages: Ints, cut: PageCut) -> Load:
        """Start to load the byte range `cut` of these pages. They must be in range and fit into one
        request. The memory of a load is overwritten by the load started num_ahead + 1 loads later.

        Raises:
            DeviceFailure: the device failed. Calling the returned load may raise it too.
        """
        ...

    def close(self) -> None:
        """Release the buffers. Afterwards nothing reads the pool for this connection.
        Idempotent.
        """
        ...


class ReceiveBuffers(Protocol):
    """The receiving side of one connection: pages from the socket into a pool. Not thread-safe."""

    request_bytes: int  # upper limit for one request of several pages

    def vectors(self, pages: Ints, head: bytearray, kind: FrameKind, cut: PageCut) -> Vectors:
        """Return the iovecs of `head`, then of the byte range `cut` of these pages, in order. The
        pages must be in range. `head` must live as long as the iovecs are used.

        Raises:
            DeviceFailure: the device failed. All methods here may raise it.
        """
        ...

    def landed(self, pages: Ints, kind: FrameKind, cut: PageCut) -> None:
        """Record that the bytes of the latest `vectors` call, with the same arguments, arrived."""
        ...

    def settle(self) -> None:
        """Block until every received page is in the pool, visible to the next forward pass. No
        later writes follow.
        """
        ...


class TcpMemory(Protocol):
    """The memory that one end serves from or reads into: a pool, and scratch pages on the same
    device. Shared by any number of connections and threads.
    """

    scratch_pages: int

    def departures(self) -> SendBuffers:
        """Return the sending side for a new connection. Raises TransferError if memory is short."""
        ...

    def arrivals(self) -> ReceiveBuffers:
        """Return the receiving side of a connection. Raises TransferError if memory is short."""
        ...


class TcpHostMemory:
    """Host memory. Bytes go directly between pool and socket."""

    def __init__(self, pool: PagePool) -> None:
        self._scratch = ReadScratch(pool.page_bytes)
        self._tables = {
            FrameKind.POOL: PageTable(pool),
            FrameKind.SCRATCH: PageTable(self._scratch.pool),
        }
        self.scratch_pages = self._scratch.pool.num_pages

    def departures(self) -> "_HostDepartures":
        return _HostDepartures(self._tables)

    def arrivals(self) -> "_HostArrivals":
        return _HostArrivals(self._tables)


class _HostDepartures:
    num_ahead = 0

    def __init__(self, tables: dict[FrameKind, PageTable]) -> None:
        self._tables = tables

    def begin(self, kind: FrameKind, pages: Ints, cut: PageCut) -> Load:
        return partial(self._tables[kind].vectors, pages, cut=cut)

    def close(self) -> None:
        """No-op: the socket has copied what it sent."""


class _HostArrivals:
    request_bytes = 1 << 20

    def __init__(self, tables: dict[FrameKind, PageTable]) -> None:
        self._tables = tables

    def vectors(self, pages: Ints, head: bytearray, kind: FrameKind, cut: PageCut) -> Vectors:
        return self._tables[kind].vectors(pages, head, cut)

    def landed(self, pages: Ints, kind: FrameKind, cut: PageCut) -> None:
        """No-op: the pages are already in the pool."""

    def settle(self) -> None:
        """No-op: the pages are already in the pool."""
