"""Where pages leave a pool for a socket, and where they enter one from it.

Host memory has no such place: bytes go straight from and into the pool. staging.py has the
one of a device's memory. The ends of a connection know neither, only what is promised here.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

from kvtransfer.backends.base import Ints, PagePool
from kvtransfer.backends.scatter import PageTable, Vectors
from kvtransfer.backends.scratch import Scratch
from kvtransfer.backends.tcp.wire import MAX_REQUEST_PAGES, Kind

_REQUEST_BYTES = 1 << 20

# The iovecs of a head and the pages behind it. Blocks until the pages are in host memory; the head
# must live for as long as the iovecs are used.
Load: TypeAlias = Callable[[bytearray], Vectors]


class Departures(Protocol):
    """Pages on their way into one socket. For one thread."""

    num_ahead: int  # loads that may be begun before an earlier one has been sent

    def begin(self, kind: Kind, pages: Ints) -> Load:
        """Pages in range, and at most as many as one request may ask for. What a load has named is
        overwritten by the load that is begun num_ahead + 1 loads later.

        Raises:
            DeviceFailure: as may the load itself.
        """
        ...

    def close(self) -> None:
        """After it returns nothing reads the pool on behalf of this connection. Idempotent."""
        ...


class Arrivals(Protocol):
    """Pages on their way from one socket into a pool. For one thread."""

    request_pages: int  # that one request should ask for, at most

    def vectors(self, pages: Ints, head: bytearray, kind: Kind) -> Vectors:
        """The iovecs of `head` and then of the bytes for these pages, in their order. Both must
        be in range, and `head` must live for as long as the iovecs are used.

        Raises:
            DeviceFailure: as may everything here.
        """
        ...

    def landed(self, pages: Ints, kind: Kind) -> None:
        """The bytes are where `vectors`, called last and with the same pages, said."""
        ...

    def settle(self) -> None:
        """Returns once every page that has landed is in the pool, where the next forward that is
        launched sees it. Nothing lands later."""
        ...


class Memory(Protocol):
    """What one end serves from or reads into: a pool and scratch pages where the pool is. For any
    number of connections and threads."""

    scratch_pages: int

    def departures(self) -> Departures:
        """For one more connection. Raises TransferError where memory is short."""
        ...

    def arrivals(self) -> Arrivals:
        """Likewise."""
        ...


class HostMemory:
    """Host memory: bytes go straight between pool and socket."""

    def __init__(self, pool: PagePool) -> None:
        self._scratch = Scratch(pool.page_bytes)
        self._page_bytes = pool.page_bytes
        self._tables = {
            Kind.POOL: PageTable(pool),
            Kind.SCRATCH: PageTable(self._scratch.pool),
        }
        self.scratch_pages = self._scratch.pool.num_pages

    def departures(self) -> "_HostDepartures":
        return _HostDepartures(self._tables)

    def arrivals(self) -> "_HostArrivals":
        return _HostArrivals(self._tables, self._page_bytes)


class _HostDepartures:
    num_ahead = 0

    def __init__(self, tables: dict[Kind, PageTable]) -> None:
        self._tables = tables

    def begin(self, kind: Kind, pages: Ints) -> Load:
        return partial(self._tables[kind].vectors, pages)

    def close(self) -> None:
        """Nothing to do: the socket has read what it has sent."""


class _HostArrivals:
    def __init__(self, tables: dict[Kind, PageTable], page_bytes: int) -> None:
        self._tables = tables
        self.request_pages = min(MAX_REQUEST_PAGES, max(1, _REQUEST_BYTES // page_bytes))

    def vectors(self, pages: Ints, head: bytearray, kind: Kind) -> Vectors:
        return self._tables[kind].vectors(pages, head)

    def landed(self, pages: Ints, kind: Kind) -> None:
        """Nothing to do: they are in the pool."""

    def settle(self) -> None:
        """Nothing to do: they are in the pool."""
