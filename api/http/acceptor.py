"""A client's connection, between the event loop and aiohttp, which serves one request at a time.

This module adds what aiohttp leaves open: a time limit for each state of a connection, and a limit
of the bytes held for its client. A connection is always read, so that its end is noticed even if
the client has sent more. A closed connection cancels the request that is being served. Serving has
no time limit but the request's own budget and the limit for unread output.
"""

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from api.http.shared import UNKNOWN_PEER, ConnectionSlot, HttpContext, HttpPeer, peer_of

_MAX_UNSENT_BYTES = 64 << 10  # above it, writers of a response wait
_HEAD_BYTES = 64 << 10  # may come in addition to a body of maximum length
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpAcceptor(asyncio.Transport, asyncio.Protocol):
    """A protocol for the event loop, and a transport for aiohttp.

    uvloop, like asyncio, sets TCP_NODELAY on every TCP socket it accepts.
    """

    def __init__(
        self,
        shared: HttpContext,
        make_inside: Callable[["HttpAcceptor"], asyncio.Protocol],
        on_closed: Callable[[HttpPeer], None],
    ) -> None:
        """
        Args:
            make_inside: makes the protocol that reads requests and writes responses through this
                transport.
            on_closed: called after the connection has ended.
        """
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
        self._full = False  # reading is paused inside
        self._ahead = bytearray()  # received, but not yet passed inside
        self._unused = True  # no part of a request has arrived yet
        self._receiving = False  # part of a request has arrived, and none is being served
        self._answering = False
        self._leaving = False  # no further request is read
        self._num_inside = 0  # bytes of requests that are held inside
        self._num_arriving = 0  # this connection's part of HttpContext.num_arriving

    @property
    def reusable(self) -> bool:
        """Return whether another request can be served after this one."""
        return not (self._leaving or self._shared.draining)

    def expire(self) -> None:
        if self._receiving and not self._leaving:
            self.reject(408, f"no whole request within {self._shared.limits.receive_s:g} s")
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
        """Stop reading from this client. Send it the reason, unless a request is being served."""
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

    # Called by the event loop ---------------------------------------------------------------------

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
            self.reject(400, "too much was sent before the first response")
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

    # Called by a request --------------------------------------------------------------------------

    def receive(self) -> None:
        """Note that part of a request has arrived."""
        if not (self._receiving or self._leaving):
            self._unused, self._receiving = False, True
            self.deadline = self._shared.now + self._shared.limits.receive_s
            if self._place is not None:
                self._place.busy()

    def ask_for_body(self) -> None:
        """Ask a client that waits for 100-continue for its body."""
        self._transport.write(_CONTINUE)

    def answering(self, num_body_bytes: int) -> None:
        """Note that the whole request has arrived, and that its body is held."""
        self._receiving = False
        self._answering = True
        self.deadline = math.inf
        self._hold(num_body_bytes)
        if self._full:
            self._transport.resume_reading()

    def body_taken(self) -> None:
        self._hold(0)

    def answered(self) -> None:
        """Note that the whole response is written, and that its client has read enough of it."""
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

    # Called by aiohttp, as on a transport ---------------------------------------------------------

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause reading until the current request has arrived.

        During a response the connection is read all the same.
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

    # Internal -------------------------------------------------------------------------------------

    def _take_in(self, data: bytes) -> None:
        self.receive()
        self._hold(self._num_inside + len(data))
        limits = self._shared.limits
        if self._shared.num_arriving > limits.max_arriving_bytes:
            self.reject(503, "too many requests are being received")
        elif self._num_inside > limits.max_body_bytes + _HEAD_BYTES:
            self.reject(413, f"a request has at most {limits.max_body_bytes} bytes of body")
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
        """End the connection for the inner protocol, whatever happens to the socket."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.connection_lost(error)

    def _linger(self, longest_s: float) -> None:
        """End a connection whose client may still be sending.

        Closing a socket with unread bytes would discard the response. TLS has no half-closed state.
        It has its own closing handshake, which waits for the client.
        """
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self.deadline = self._shared.now + longest_s

    def _close(self) -> None:
        """Close after pending writes. A client that does not read them has until the deadline."""
        self._leaving = True
        self.deadline = self._shared.now + self._shared.limits.idle_s
        self._transport.close()

    def _hold(self, num_inside: int) -> None:
        """Record the bytes held for this connection: `num_inside` bytes of the running request, and
        the bytes of later requests that the client sent ahead.
        """
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


# A client's connection until its TLS handshake is complete. Then a HttpAcceptor takes over.
#
# It counts as a connection from the start and has a deadline, so a silent client does not hold its
# place for long.
class Handshake(asyncio.Protocol):
    """The protocol that the server makes for each client if it serves TLS."""

    def __init__(
        self,
        shared: HttpContext,
        acceptor: Callable[[], HttpAcceptor],
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """
        Args:
            acceptor: makes the HttpAcceptor that takes over the connection.
            context: returns the TLS context. Called once per handshake.
        """
        self.deadline = math.inf  # the event loop has its own deadline for handshakes
        self._shared = shared
        self._acceptor = acceptor
        self._context = context
        self._peer = ""
        self._place: ConnectionSlot | None = None
        self._shaking: asyncio.Task[None]

    def expire(self) -> None:
        self.abort()

    def drain(self) -> None:
        """Complete the handshake. The connection may have one request."""

    def abort(self) -> None:
        self._shaking.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Move the socket out of the transport before anything is read.

        The event loop reports whether a handshake failed only for a socket that its caller passes
        in.
        """
        peer = peer_of(transport)
        self._place = self._shared.room.enter(peer.host, self.abort)
        if self._place is not None:
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
            self._peer = peer.address
            self._shared.join(self)
            self._shaking = asyncio.ensure_future(self._shake(socket.socket(fileno=descriptor)))
        cast(asyncio.Transport, transport).abort()

    async def _shake(self, client: socket.socket) -> None:
        limits = self._shared.limits
        try:
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Standing(self._stands),
                client,
                ssl=self._context(),
                ssl_handshake_timeout=limits.handshake_s,
                ssl_shutdown_timeout=limits.linger_s,
            )
        except OSError as error:  # TLS error, reset or timeout
            because = str(error) or "the client disconnected"
            self._shared.log.info(
                "TLS handshake with a client failed", peer=self._peer, reason=because
            )
        finally:
            if self in self._shared.members:  # `_stands` was not called
                self._leave()
                client.close()

    def _stands(self, transport: asyncio.Transport) -> None:
        self._leave()
        acceptor = self._acceptor()
        transport.set_protocol(acceptor)
        acceptor.connection_made(transport)

    def _leave(self) -> None:
        self._shared.leave(self)
        if self._place is not None:
            self._place.leave()


class _Standing(asyncio.Protocol):
    """The protocol that the event loop holds until the handshake is complete."""

    def __init__(self, stands: Callable[[asyncio.Transport], None]) -> None:
        self._stands = stands

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stands(cast(asyncio.Transport, transport))
