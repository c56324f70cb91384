"""Transfer of pages between a pool and a socket, for host memory and through a common interface.

Host memory needs no staging: bytes go directly from and into the pool. staging.py implements the
interface for device memory. The ends of a connection know only this interface.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

from kvtransfer.backends.base import Ints, PageCut, PagePool
from kvtransfer.backends.scatter import PageTable, Vectors
from kvtransfer.backends.scratch import ReadScratch
from kvtransfer.backends.tcp.wire import FrameKind

# The iovecs of a head and of the pages after it. Blocks until the pages are in host memory. The
# head must live for as long as the iovecs are used.
Load: TypeAlias = Callable[[bytearray], Vectors]


class SendBuffers(Protocol):
    """Pages on their way into one socket. For one thread."""

    num_ahead: int  # loads that may be started before an earlier one has been sent

    def begin(self, kind: FrameKind, pages: Ints, cut: PageCut) -> Load:
        """Start to load this cut of pages. They must be in range, and at most as much as one
        request may ask for. The memory that a load names is overwritten by the load that is started
        num_ahead + 1 loads later.

        Raises:
            DeviceFailure: the device failed. The load itself may raise it too.
        """
        ...

    def close(self) -> None:
        """Close it. After it returns nothing reads the pool for this connection. Idempotent."""
        ...


class ReceiveBuffers(Protocol):
    """Pages on their way from one socket into a pool. For one thread."""

    request_bytes: int  # the most that one request for several pages should ask for

    def vectors(self, pages: Ints, head: bytearray, kind: FrameKind, cut: PageCut) -> Vectors:
        """Return the iovecs of `head` and then of the bytes for this cut of the pages, in order.
        They must be in range, and `head` must live for as long as the iovecs are used.

        Raises:
            DeviceFailure: the device failed. All methods here may raise it.
        """
        ...

    def landed(self, pages: Ints, kind: FrameKind, cut: PageCut) -> None:
        """Record that the bytes of the latest `vectors` call have arrived. The arguments must be
        the same.
        """
        ...

    def settle(self) -> None:
        """Return when every landed page is in the pool and visible to the next forward that is
        launched. Nothing lands later.
        """
        ...


class TcpMemory(Protocol):
    """The memory that one end serves from or reads into: a pool, and scratch pages on the same
    device. For any number of connections and threads.
    """

    scratch_pages: int

    def departures(self) -> SendBuffers:
        """Return the sending side of a new connection. Raises TransferError if memory is short."""
        ...

    def arrivals(self) -> ReceiveBuffers:
        """Return the receiving side of a new connection. Raises TransferError if memory
        is short.
        """
        ...


class TcpHostMemory:
    """Host memory: bytes go directly between pool and socket."""

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
        """Do nothing: the socket has copied what it sent."""


class _HostArrivals:
    request_bytes = 1 << 20

    def __init__(self, tables: dict[FrameKind, PageTable]) -> None:
        self._tables = tables

    def vectors(self, pages: Ints, head: bytearray, kind: FrameKind, cut: PageCut) -> Vectors:
        return self._tables[kind].vectors(pages, head, cut)

    def landed(self, pages: Ints, kind: FrameKind, cut: PageCut) -> None:
        """Do nothing: the pages are in the pool."""

    def settle(self) -> None:
        """Do nothing: the pages are in the pool."""
