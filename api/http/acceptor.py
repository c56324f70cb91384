"""A client's connection, between the event loop and aiohttp, which serves one request at a time.

Adds what aiohttp lacks: a time limit for each state of a connection, and a limit of the bytes held
for a client. A connection is always read, so its end is noticed even if the client has sent more. A
closed connection cancels its request. A running request is limited only by its budget and by the
limit for unread output. All connections of a server share one HttpContext.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias, cast

from api.auth.fair_slots import ConnectionLimit, ConnectionSlot
from common.logs import ThrottledLog
from common.rpc import join_address
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)


ErrorBody: TypeAlias = Callable[[int, str], bytes]  # called with status and sentence, returns JSON


@dataclass(frozen=True, slots=True, eq=False)
class HttpPeer:
    """The client's end of one connection.

    Compared by identity: addresses can be equal, because one client port can connect to two
    addresses of the router.
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
    max_headers: int = 128  # including trailers
    max_body_bytes: int = 12 << 20  # as for a gRPC message: a prompt of a million tokens fits
    max_arriving_bytes: int = 256 << 20  # not yet read by a handler, over all connections
    max_ahead_bytes: int = 64 << 10  # of one connection, behind a request that is being served
    receive_s: float = 30.0  # time from a request's first byte to its last
    unread_s: float = 60.0  # time for a client with too much unread output to read some of it
    idle_s: float = 75.0  # time between requests, longer than the 60 s of most proxies
    first_request_s: float = 1.0  # for a connection without any request when the drain begins
    handshake_s: float = 10.0  # time from the connection to the end of its TLS handshake
    linger_s: float = 2.0  # time for a client that is still sending to read the error
    tick_s: float = 1.0  # interval of deadline checks


class ConnectionMember(Protocol):
    """A connection as HttpContext sees it."""

    deadline: float  # in time.monotonic() seconds

    def expire(self) -> None:
        """End the connection after its deadline."""

    def drain(self) -> None:
        """End the connection after its current request, or after a short time for its first one."""

    def abort(self) -> None:
        """End the connection immediately."""


class HttpContext:
    """State that all connections of a server share. For one event loop."""

    def __init__(self, limits: HttpLimits, error_body: ErrorBody, metrics: RouterMetrics) -> None:
        self.limits = limits
        self.error_body = error_body
        self.metrics = metrics
        self.room = ConnectionLimit(limits.max_connections)
        self.log = ThrottledLog(log)  # about clients that are not served
        self.members: set[ConnectionMember] = set()
        self.all_gone = asyncio.Event()
        self.all_gone.set()
        self.num_arriving = 0  # bytes of requests that handlers have not read yet
        self.draining = False
        self.now = time.monotonic()  # time of the last tick

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


_MAX_UNSENT_BYTES = 64 << 10  # above it, writers of a response wait
_HEAD_BYTES = 64 << 10  # beyond the maximum length of a body
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpAcceptor(asyncio.Transport, asyncio.Protocol):
    """A protocol for the event loop, and a transport for aiohttp.

    uvloop, like asyncio, sets TCP_NODELAY on every TCP socket it accepts.

    Args:
        make_inside: makes the aiohttp protocol that uses this object as its transport.
        on_closed: called after the connection has ended.
    """

    def __init__(
        self,
        shared: HttpContext,
        make_inside: Callable[["HttpAcceptor"], asyncio.Protocol],
        on_closed: Callable[[HttpPeer], None],
    ) -> None:
        super().__init__()
        self.deadline = math.inf
        self.peer = UNKNOWN_PEER
        self._shared = shared
        self._make_inside = make_inside
        self._on_closed = on_closed
        self._transport: asyncio.Transport
        self._inside: asyncio.Protocol | None = None
        self._place: ConnectionSlot | None = None
        self._writable = True
        self._full = False  # aiohttp has paused reading
        self._ahead = bytearray()  # received, but not yet passed to aiohttp
        self._unused = True  # no part of a request has arrived yet
        self._receiving = False  # part of a request has arrived, and none is being served
        self._answering = False
        self._leaving = False  # no further request will be read
        self._num_inside = 0  # bytes of requests that aiohttp holds
        self._num_arriving = 0  # this connection's part of HttpContext.num_arriving

    @property
    def reusable(self) -> bool:
        """Return whether another request can be served after this one."""
        return not (self._leaving or self._shared.draining)

    def expire(self) -> None:
        if self._receiving and not self._leaving:
            self.reject(408, f"no complete request within {self._shared.limits.receive_s:g} s")
            return
        if not self._writable:
            self._shared.log.info("slow client disconnected", peer=self.peer.address)
        self.abort()

    def drain(self) -> None:
        if self._answering or self._receiving or self._leaving:
            return
        if self._unused:
            self.deadline = self._shared.now + self._shared.limits.first_request_s
        else:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    def reject(self, status: int, sentence: str) -> None:
        """Stop reading from this client. Send it the reason unless a request is being served."""
        self.forget()
        self._shared.log.info(
            "client connection rejected", peer=self.peer.address, status=status, reason=sentence
        )
        if self._answering:
            return
        self._end_inside(None)
        self._transport.write(_refusal(status, self._shared.error_body(status, sentence)))
        self._shared.metrics.http_answered(status)
        self._linger(self._shared.limits.linger_s)

    def forget(self) -> None:
        """Stop reading requests, and discard unread bytes."""
        self._leaving = True
        self._ahead = bytearray()
        self._hold(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
        self.peer = peer_of(transport)
        self._shared.join(self)
        self._place = self._shared.room.enter(self.peer.host, self._close)
        if self._place is not None:
            self._inside = self._make_inside(self)
            self._inside.connection_made(self)
            self._wait_for_request()
        elif len(self._shared.members) > 2 * self._shared.limits.max_connections:
            self.abort()  # too many connections even for an error response
        else:
            self.reject(503, "this router has reached its limit of connections")

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        if not (self._answering or self._full):
            self._take_in(data)
        elif len(self._ahead) + len(data) > self._shared.limits.max_ahead_bytes:
            self.reject(400, "too much data was sent before the first response")
        else:
            self._ahead += data
            self._hold(self._num_inside)

    def pause_writing(self) -> None:
        self._writable = False
        self.deadline = self._shared.now + self._shared.limits.unread_s
        if self._inside is not None:
            self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._writable = True
        if self._answering:
            self.deadline = math.inf
        if self._inside is not None:
            self._inside.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.forget()
        self._shared.leave(self)
        self._on_closed(self.peer)
        if self._place is not None:
            self._place.leave()
        self._end_inside(error)

    def receive(self) -> None:
        """Record that part of a request has arrived."""
        if not (self._receiving or self._leaving):
            self._unused, self._receiving = False, True
            self.deadline = self._shared.now + self._shared.limits.receive_s
            if self._place is not None:
                self._place.busy()

    def ask_for_body(self) -> None:
        """Send 100-continue to a client that waits for it."""
        self._transport.write(_CONTINUE)

    def answering(self, num_body_bytes: int) -> None:
        """Record that the whole request has arrived, and that its body is held."""
        self._receiving = False
        self._answering = True
        self.deadline = math.inf
        self._hold(num_body_bytes)
        if self._full:
            self._transport.resume_reading()

    def body_taken(self) -> None:
        self._hold(0)

    def answered(self) -> None:
        """Record that the response is written, and that the client has read enough of it."""
        self._answering = False
        self._hold(0)
        if self._transport.is_closing():
            return
        if self._leaving:
            self._linger(self._shared.limits.idle_s)
        elif self._shared.draining:
            self._close()
        else:
            self._wait_for_request()
            if self._full:
                self._transport.pause_reading()
            else:
                self._take_in_ahead()

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause passing bytes to aiohttp until the current request has arrived.

        During a response the connection itself is still read.
        """
        self._full = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading. aiohttp also calls this without an earlier pause."""
        if self._full:
            self._full = False
            if not (self._answering or self._leaving):
                self._transport.resume_reading()
                self._take_in_ahead()

    def close(self) -> None:
        if self._leaving and self._inside is not None:
            self._linger(self._shared.limits.idle_s)
        elif not self._leaving:
            self._close()

    def _take_in(self, data: bytes) -> None:
        self.receive()
        self._hold(self._num_inside + len(data))
        limits = self._shared.limits
        if self._shared.num_arriving > limits.max_arriving_bytes:
            self.reject(503, "too many requests are being received")
        elif self._num_inside > limits.max_body_bytes + _HEAD_BYTES:
            self.reject(
                413, f"the body of a request may have at most {limits.max_body_bytes} bytes"
            )
        elif self._inside is not None:
            self._inside.data_received(data)

    def _take_in_ahead(self) -> None:
        if self._ahead:
            ahead, self._ahead = bytes(self._ahead), bytearray()
            self._take_in(ahead)

    def _wait_for_request(self) -> None:
        limits, self._receiving = self._shared.limits, False
        longest_s = limits.first_request_s if self._shared.draining else limits.idle_s
        self.deadline = self._shared.now + longest_s
        if self._place is not None:
            self._place.idle()

    def _end_inside(self, error: Exception | None) -> None:
        """End the connection for aiohttp, whatever happens to the socket."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.connection_lost(error)

    def _linger(self, longest_s: float) -> None:
        """End a connection whose client may still be sending.

        Closing a socket with unread bytes would discard the response. TLS has no half-closed state:
        its closing handshake waits for the client.
        """
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self.deadline = self._shared.now + longest_s

    def _close(self) -> None:
        """Close after pending writes. The client has until the deadline to read them."""
        self._leaving = True
        self.deadline = self._shared.now + self._shared.limits.idle_s
        self._transport.close()

    def _hold(self, num_inside: int) -> None:
        """Record the bytes held: `num_inside` of the running request, and of later requests."""
        self._num_inside = num_inside
        num_bytes = num_inside + len(self._ahead)
        self._shared.num_arriving += num_bytes - self._num_arriving
        self._num_arriving = num_bytes


def _refusal(status: int, body: bytes) -> bytes:
    """Return a complete response to bytes that were never parsed as a request."""
    retry = "retry-after: 1\r\n" if status == 503 else ""
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    ).encode() + body
