"""State that all connections of one server share: limits, a clock and the bytes they hold."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from api.auth.client import network_of
from api.auth.fair_slots import FairShares
from common.logs import Throttle, ThrottledLog
from common.rpc import join_address
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

Leave = Callable[[], None]


class ConnectionSlot:
    """The place of one connection.

    Call `leave` when the connection ends. Further calls do nothing.
    """

    def __init__(self, room: "ConnectionLimit", network: str, close: Leave) -> None:
        self.close = close
        self._room = room
        self._network = network
        self._left = False

    def idle(self) -> None:
        """Mark the connection as idle, so that it may be closed in favour of a new one."""
        if not self._left:
            self._room.idle(self._network, self)

    def busy(self) -> None:
        self._room.busy(self._network, self)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._room.busy(self._network, self)
            self._room.give_back(self._network)


class ConnectionLimit:
    """The places for connections, shared between client addresses. For one event loop.

    If an address has used its share, or no place is free, a new connection replaces the connection
    that has been idle longest: one of the same address, or of the address with the most
    connections. If none of those is idle, the new connection is rejected.
    """

    def __init__(self, places: int) -> None:
        self._shares = FairShares(places)
        self._idle: dict[
            str, dict[ConnectionSlot, None]
        ] = {}  # longest idle first, never an empty dict

    def enter(self, host: str, close: Leave) -> ConnectionSlot | None:
        """Return a place for a new connection, or None if there is none.

        Args:
            host: address of the client.
            close: ends the connection. Called at most once, while the connection is idle.
        """
        network = network_of(host)
        if not self._shares.may_take(network, 1.0):
            full = self._shares.num_held >= self._shares.places
            if not self._close_one_of(self._shares.largest() if full else network):
                return None
        self._shares.take(network)
        return ConnectionSlot(self, network, close)

    def _close_one_of(self, network: str) -> bool:
        place = next(iter(self._idle.get(network, ())), None)
        if place is None:
            return False
        place.leave()
        place.close()
        return True

    # Called by places -----------------------------------------------------------------------------

    def idle(self, network: str, place: ConnectionSlot) -> None:
        self._idle.setdefault(network, {})[place] = None

    def busy(self, network: str, place: ConnectionSlot) -> None:
        idle = self._idle.get(network, {})
        idle.pop(place, None)
        if not idle:
            self._idle.pop(network, None)

    def give_back(self, network: str) -> None:
        self._shares.give_back(network)


ErrorBody: TypeAlias = Callable[[int, str], bytes]  # (status, sentence) -> JSON


@dataclass(frozen=True, slots=True, eq=False)
class HttpPeer:
    """The client's end of one connection.

    No two are equal, although addresses can be. If a router listens on two of its own addresses,
    one client port can connect twice.
    """

    host: str
    address: str  # host:port


UNKNOWN_PEER = HttpPeer("", "")


def peer_of(transport: asyncio.BaseTransport) -> HttpPeer:
    """Return the client of a connection, "gone" if it has closed the connection already.

    Call it once for each connection.
    """
    name = transport.get_extra_info("peername")
    return HttpPeer(str(name[0]), join_address(*name[:2])) if name else HttpPeer("gone", "gone")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of clients, in size and time."""

    max_connections: int
    max_line_bytes: int = 8 << 10  # of a request line or a header
    max_headers: int = 128  # trailers included
    max_body_bytes: int = 12 << 20  # as for a gRPC message: a prompt of a million tokens fits
    max_arriving_bytes: int = 256 << 20  # not yet read by a handler, over all connections
    max_ahead_bytes: int = 64 << 10  # of one connection, behind a request that is being served
    receive_s: float = 30.0  # from a request's first byte to its last
    unread_s: float = 60.0  # for a client with too much unread to read some of it
    idle_s: float = 75.0  # between requests. Longer than the 60 s of most proxies
    first_request_s: float = 1.0  # on a connection that had none when the server began to drain
    handshake_s: float = 10.0  # from the connection to the end of its TLS handshake
    linger_s: float = 2.0  # for a client that still sends to read the error
    tick_s: float = 1.0  # interval of deadline checks


class ConnectionMember(Protocol):
    """A connection, as the server sees it."""

    deadline: float  # in time.monotonic() seconds

    def expire(self) -> None:
        """End the connection after its deadline."""

    def drain(self) -> None:
        """End the connection, unless it has a request to serve or may get its first one."""

    def abort(self) -> None:
        """End the connection immediately."""


class HttpContext:
    """Shared state of all connections. For one event loop."""

    def __init__(self, limits: HttpLimits, error_body: ErrorBody, metrics: RouterMetrics) -> None:
        self.limits = limits
        self.error_body = error_body
        self.metrics = metrics
        self.room = ConnectionLimit(limits.max_connections)
        self.log = ThrottledLog(log, Throttle())  # about clients that are not served
        self.members: set[ConnectionMember] = set()
        self.all_gone = asyncio.Event()
        self.all_gone.set()
        self.num_arriving = 0  # bytes of requests that no handler has read yet
        self.draining = False
        self.now = time.monotonic()  # as of the last tick

    def join(self, member: ConnectionMember) -> None:
        self.members.add(member)
        self.all_gone.clear()
        self.metrics.http_connections(len(self.members))

    def leave(self, member: ConnectionMember) -> None:
        self.members.discard(member)
        self.metrics.http_connections(len(self.members))
        if not self.members:
            self.all_gone.set()

    def tick(self) -> None:
        """Update the clock and expire overdue connections."""
        self.now = time.monotonic()
        for member in [m for m in self.members if m.deadline < self.now]:
            member.expire()
