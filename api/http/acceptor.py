"""Stands between a client's connection and aiohttp, which takes one request after the other.

What aiohttp leaves open is decided here: how long each state of a connection may last, and how
much is held of what its client sends. A connection is always read, so that its end is seen whatever
else its client has sent; one that ends cancels the request that is being answered. Answering has no
deadline but the request's own budget, and the time its client may leave it unread.
"""

import asyncio
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from api.http.connection_limit import Place
from api.http.shared import NOBODY, Peer, Shared, peer_of

_MAX_UNSENT_BYTES = 64 << 10  # above it, whoever writes an answer waits
_HEAD_BYTES = 64 << 10  # that may come with a body which is as long as it may be
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Door(asyncio.Transport, asyncio.Protocol):
    """A protocol for the event loop, and a transport for aiohttp.

    uvloop, as asyncio, sets TCP_NODELAY on every TCP socket it accepts.
    """

    def __init__(
        self,
        shared: Shared,
        make_inside: Callable[["Door"], asyncio.Protocol],
        on_closed: Callable[[Peer], None],
    ) -> None:
        """
        Args:
            make_inside: gives what reads requests and writes answers, of which this is the
                transport.
            on_closed: called when the connection has ended.
        """
        super().__init__()
        self.deadline = math.inf
        self.peer = NOBODY
        self._shared = shared
        self._make_inside = make_inside
        self._on_closed = on_closed
        self._transport: asyncio.Transport
        self._inside: asyncio.Protocol | None = None
        self._place: Place | None = None
        self._writable = True
        self._full = False  # nothing more is taken inside, for now
        self._ahead = bytearray()  # not yet taken inside
        self._receiving = False  # part of a request is here, and none is being answered
        self._answering = False
        self._leaving = False  # nothing more is read as a request
        self._num_inside = 0  # bytes of requests that are held inside
        self._num_arriving = 0  # this connection's part of Shared.num_arriving

    @property
    def goes_on(self) -> bool:
        """Whether another request can be answered after this one."""
        return not (self._leaving or self._shared.draining)

    def expire(self) -> None:
        if self._receiving and not self._leaving:
            self.turn_away(408, f"no whole request within {self._shared.limits.receive_s:g} s")
            return
        if not self._writable:
            self._shared.log.info("client cut off, it reads no answer", peer=self.peer.address)
        self.abort()

    def drain(self) -> None:
        if not (self._answering or self._receiving or self._leaving):
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    def turn_away(self, status: int, sentence: str) -> None:
        """Nothing more can be read from this client: tells it why, unless it is being answered."""
        self.forget()
        self._shared.log.info(
            "client turned away", peer=self.peer.address, status=status, because=sentence
        )
        if self._answering:
            return
        self._end_inside(None)
        self._transport.write(_refusal(status, self._shared.error_body(status, sentence)))
        self._shared.metrics.http_answered(status)
        self._linger(self._shared.limits.linger_s)

    def forget(self) -> None:
        """Nothing more is read as a request, and of what was not read nothing is held."""
        self._leaving = True
        self._ahead = bytearray()
        self._hold(0)

    # What the event loop calls --------------------------------------------------------------------

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
            self.abort()  # not even words for so many
        else:
            self.turn_away(503, "there are as many connections as this router takes")

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        if not (self._answering or self._full):
            self._take_in(data)
        elif len(self._ahead) + len(data) > self._shared.limits.max_ahead_bytes:
            self.turn_away(400, "too much was sent before the first request was answered")
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

    # What a request calls -------------------------------------------------------------------------

    def receive(self) -> None:
        """Part of it is here."""
        if not (self._receiving or self._leaving):
            self._receiving = True
            self.deadline = self._shared.now + self._shared.limits.receive_s
            if self._place is not None:
                self._place.busy()

    def ask_for_body(self) -> None:
        """Of a client that waits for that."""
        self._transport.write(_CONTINUE)

    def answering(self, num_body_bytes: int) -> None:
        """All of it is here, and its body is held."""
        self._receiving = False
        self._answering = True
        self.deadline = math.inf
        self._hold(num_body_bytes)
        if self._full:
            self._transport.resume_reading()

    def body_taken(self) -> None:
        self._hold(0)

    def answered(self) -> None:
        """All of the answer is written, and its client has taken enough of it."""
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

    # What aiohttp calls, as of a transport --------------------------------------------------------

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Until the request that is being received is here: then it is read all the same."""
        self._full = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Is called whenever there is room, also where there was."""
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

    # Inside ---------------------------------------------------------------------------------------

    def _take_in(self, data: bytes) -> None:
        self.receive()
        self._hold(self._num_inside + len(data))
        limits = self._shared.limits
        if self._shared.num_arriving > limits.max_arriving_bytes:
            self.turn_away(503, "too many requests are being received")
        elif self._num_inside > limits.max_body_bytes + _HEAD_BYTES:
            self.turn_away(413, f"a request has at most {limits.max_body_bytes} bytes of body")
        elif self._inside is not None:
            self._inside.data_received(data)

    def _take_in_ahead(self) -> None:
        if self._ahead:
            ahead, self._ahead = bytes(self._ahead), bytearray()
            self._take_in(ahead)

    def _wait_for_request(self) -> None:
        self._receiving = False
        self.deadline = self._shared.now + self._shared.limits.idle_s
        if self._place is not None:
            self._place.idle()

    def _end_inside(self, error: Exception | None) -> None:
        """For what is inside the connection is lost, whatever becomes of it."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.connection_lost(error)

    def _linger(self, longest_s: float) -> None:
        """Ends a connection whose client may still be sending. Closed with unread bytes, the socket
        would take the answer back. TLS has no such half of a connection, and an end of its own,
        which waits for the client's."""
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self.deadline = self._shared.now + longest_s

    def _close(self) -> None:
        """After what is written; a client that does not read it has until the deadline."""
        self._leaving = True
        self.deadline = self._shared.now + self._shared.limits.idle_s
        self._transport.close()

    def _hold(self, num_inside: int) -> None:
        """So many bytes of requests are held inside, and those that were sent ahead."""
        self._num_inside = num_inside
        num_bytes = num_inside + len(self._ahead)
        self._shared.num_arriving += num_bytes - self._num_arriving
        self._num_arriving = num_bytes


def _refusal(status: int, body: bytes) -> bytes:
    """A whole answer, to what was never read as a request."""
    retry = "retry-after: 1\r\n" if status == 503 else ""
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    ).encode() + body
