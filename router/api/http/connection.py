"""One client's connection: requests in, answers out, one at a time and in order.

A connection that ends cancels the request that is being answered, and it is always read, so that
its end is seen whatever else its client has sent. Every state has a deadline but answering, which
is bounded by the request's own budget, and by how long its client may leave it unread.
"""

import asyncio
import math
from collections import deque
from typing import cast

from router.api.http.reader import RequestReader
from router.api.http.request import NOBODY, BadRequest, Request
from router.api.http.responder import JSON, Responder
from router.api.http.room import Place
from router.api.http.routes import refusing
from router.api.http.shared import Shared, peer_of

_MAX_UNSENT_BYTES = 64 << 10  # above it, whoever writes an answer waits
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Stands for what was never read as a request.
_NO_REQUEST = Request("", "", {}, b"", takes_chunks=True, keep_alive=False)
_TOO_MUCH_AHEAD = "too much was sent before the first request was answered"


class Connection(asyncio.Protocol):
    """Made by the server for each client that connects.

    uvloop, as asyncio, sets TCP_NODELAY on every TCP socket it accepts.
    """

    def __init__(self, shared: Shared) -> None:
        self.deadline = math.inf
        self._shared = shared
        self._peer = NOBODY
        self._reader: RequestReader
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._complete: deque[Request] = deque()
        self._ahead = bytearray()  # behind them; not yet read as requests
        self._request = _NO_REQUEST  # that is being answered
        self._responder: Responder
        self._answering: asyncio.Task[None] | None = None
        self._place: Place | None = None
        self._receiving = False  # part of a request is here, and none is being answered
        self._leaving = False  # nothing more is read as a request
        self._num_arriving = 0  # this connection's part of Shared.num_arriving

    def expire(self) -> None:
        if self._receiving and not self._leaving:
            self._turn_away(408, f"no whole request within {self._shared.limits.receive_s:g} s")
            return
        if not self._writable.is_set():
            self._shared.log.info("client cut off, it reads no answer", peer=self._peer.address)
        self.abort()

    def drain(self) -> None:
        if self._answering is None and not self._receiving and not self._leaving:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    # What the event loop calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
        self._peer = peer_of(transport)
        self._reader = RequestReader(
            max_head_bytes=self._shared.limits.max_head_bytes,
            max_body_bytes=self._shared.limits.max_body_bytes,
            checks=self._shared.checks.in_order,
            peer=self._peer,
            on_taken=self._count_arriving,
        )
        self._shared.join(self)
        self._place = self._shared.room.enter(self._peer.host, self._close)
        if self._place is not None:
            self._next()
        elif len(self._shared.members) > 2 * self._shared.limits.max_connections:
            self.abort()  # not even words for so many
        else:
            self._turn_away(503, "there are as many connections as this router takes")

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        if self._answering is None and self._writable.is_set():
            self._receive(data)
        elif len(self._ahead) + len(data) > self._shared.limits.max_ahead_bytes:
            self._turn_away(400, _TOO_MUCH_AHEAD)
        else:
            self._ahead += data
            self._count_arriving()

    def pause_writing(self) -> None:
        self._writable.clear()
        self.deadline = self._shared.now + self._shared.limits.unread_s

    def resume_writing(self) -> None:
        self._writable.set()
        if self._answering is not None:
            self.deadline = math.inf
        elif not self._leaving:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        self._shared.leave(self)
        self._shared.checks.closed(self._peer)
        if self._place is not None:
            self._place.leave()
        if self._answering is not None:
            self._answering.cancel()

    # Inside ---------------------------------------------------------------------------------------

    def _receive(self, data: bytes | bytearray) -> None:
        """Nothing is being answered: reads the next request, and answers it once it is whole."""
        if self._place is not None:
            self._place.busy()
        try:
            complete, rest = self._reader.feed(memoryview(data))
        except BadRequest as bad:
            self._turn_away(bad.status, str(bad))
            return
        self._complete += complete
        self._ahead += rest
        self._count_arriving()
        if self._shared.num_arriving > self._shared.limits.max_arriving_bytes:
            self._turn_away(503, "too many requests are being received")
            return
        self._next()
        if self._reader.refused:
            self._forget()
        elif len(rest) > self._shared.limits.max_ahead_bytes:
            self._turn_away(400, _TOO_MUCH_AHEAD)

    def _next(self) -> None:
        """Answers the next request, or waits for one."""
        if self._complete:
            self._answer(self._complete.popleft())
        elif self._ahead:
            ahead, self._ahead = self._ahead, bytearray()
            self._receive(ahead)
        else:
            self._wait_for_request()

    def _answer(self, request: Request) -> None:
        self._receiving = False
        self.deadline = math.inf
        responder = Responder(
            self._transport,
            self._writable,
            request,
            date=self._shared.date,
            keep_alive=request.keep_alive and not self._shared.draining,
            headers=self._shared.checks.headers(request),
        )
        self._request, self._responder = request, responder
        handler = refusing(request.refused) if request.refused else self._shared.route(request)
        self._answering = asyncio.create_task(handler(request, responder))
        self._answering.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        responder = self._responder
        self._answering = None
        self._request = _NO_REQUEST
        self._count_arriving()
        error = None if task.cancelled() else task.exception()
        if error is not None or not (responder.finished or self._transport.is_closing()):
            self._shared.log.error("a request was not answered to its end", exc_info=error)
            if responder.status:
                self.abort()
                return
            sentence = "the router has failed to answer; its log says more"
            responder.reply(500, self._shared.error_body(500, sentence))
        if self._transport.is_closing():
            return
        self._shared.metrics.http_answered(responder.status)
        if self._leaving:
            self._linger(self._shared.limits.idle_s)
        elif self._shared.draining or not responder.keep_alive:
            self._close()
        elif self._writable.is_set():
            self._next()

    def _wait_for_request(self) -> None:
        limits = self._shared.limits
        if not self._reader.num_received:
            self._receiving = False
            self.deadline = self._shared.now + limits.idle_s
            if self._place is not None:
                self._place.idle()
        elif not self._receiving:
            self._receiving = True
            self.deadline = self._shared.now + limits.receive_s
        if self._reader.wants_continue:
            self._reader.wants_continue = False
            self._transport.write(_CONTINUE)

    def _turn_away(self, status: int, sentence: str) -> None:
        """Nothing more can be read from this client: tells it why, unless it is being answered."""
        self._forget()
        self._shared.log.info(
            "client turned away", peer=self._peer.address, status=status, because=sentence
        )
        if self._answering is not None:
            self._responder.keep_alive = False
            return
        self._responder = Responder(
            self._transport, self._writable, _NO_REQUEST, date=self._shared.date, keep_alive=False
        )
        headers = (("retry-after", "1"),) if status == 503 else ()
        self._responder.reply(status, self._shared.error_body(status, sentence), JSON, headers)
        self._shared.metrics.http_answered(status)
        self._linger(self._shared.limits.linger_s)

    def _forget(self) -> None:
        """Nothing more is read as a request, and of what was not read nothing is held."""
        self._leaving = True
        self._complete.clear()
        self._ahead = bytearray()
        self._reader.forget()
        self._count_arriving()

    def _linger(self, longest_s: float) -> None:
        """Ends a connection whose client may still be sending. Closed with unread bytes, the socket
        would take the answer back. TLS has no such half of a connection, and an end of its own,
        which waits for the client's."""
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

    def _count_arriving(self) -> None:
        """What is held here of requests that nobody has read."""
        num_bytes = 0
        if not self._leaving:
            num_bytes = self._reader.num_received + len(self._ahead) + self._request.num_body_bytes
            for request in self._complete:
                num_bytes += request.num_body_bytes
        self._shared.num_arriving += num_bytes - self._num_arriving
        self._num_arriving = num_bytes
