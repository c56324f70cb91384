"""One client's connection: requests in, answers out, one at a time and in order.

A connection that ends cancels the request that is being answered. Every state has a deadline but
answering, which is bounded by the request's own budget.
"""

import asyncio
import logging
import math
from collections import deque
from typing import cast

from common.logs import kv
from router.http.request import BadRequest, Request, RequestReader
from router.http.responder import JSON, Responder
from router.http.shared import Shared, peer_address

log = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 << 10  # above it, whoever writes an answer waits
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Stands for what was never read as a request.
_NO_REQUEST = Request("", "", {}, b"", takes_chunks=True, keep_alive=False)


class Connection(asyncio.Protocol):
    """Made by the server for each client that connects.

    uvloop, as asyncio, sets TCP_NODELAY on every TCP socket it accepts.
    """

    def __init__(self, shared: Shared) -> None:
        self.deadline = math.inf
        self._shared = shared
        self._reader = RequestReader(
            max_head_bytes=shared.limits.max_head_bytes,
            max_body_bytes=shared.limits.max_body_bytes,
        )
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._ahead: deque[Request] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._receiving = False  # part of a request is here, and none is being answered
        self._leaving = False  # nothing more is read
        self._num_arriving = 0  # this connection's part of Shared.num_arriving

    def expire(self) -> None:
        if self._receiving and not self._leaving:
            self._turn_away(408, f"no whole request within {self._shared.limits.receive_s:g} s")
        else:
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
        self._shared.join(self)
        num_connections, allowed = len(self._shared.members), self._shared.limits.max_connections
        if num_connections > 2 * allowed:
            self.abort()  # not even words for so many
        elif num_connections > allowed:
            self._turn_away(503, "there are as many connections as this router takes")
        else:
            self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        try:
            self._ahead += self._reader.feed(data)
        except BadRequest as bad:
            self._turn_away(bad.status, str(bad))
            return
        self._count_arriving(self._reader.num_received)
        if self._shared.num_arriving > self._shared.limits.max_arriving_bytes:
            self._turn_away(503, "too many requests are being received")
        elif len(self._ahead) > self._shared.limits.max_ahead:
            self._turn_away(400, "too many requests before the first one was answered")
        elif self._answering is None:
            self._next()
        else:
            self._read_no_further()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._leaving = True
        self._count_arriving(0)
        self._shared.leave(self)
        if self._answering is not None:
            self._answering.cancel()

    # Inside ---------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Answers the next request, or waits for one."""
        if not self._ahead:
            self._wait_for_request()
            return
        self._receiving = False
        self.deadline = math.inf
        request = self._ahead.popleft()
        responder = Responder(
            self._transport,
            self._writable,
            request,
            date=self._shared.date,
            keep_alive=request.keep_alive and not self._shared.draining,
        )
        handler = self._shared.route(request)
        self._answering = asyncio.create_task(handler(request, responder))
        self._answering.add_done_callback(lambda task: self._answered(task, responder))
        self._read_no_further()

    def _answered(self, task: asyncio.Task[None], responder: Responder) -> None:
        self._answering = None
        error = None if task.cancelled() else task.exception()
        if error is not None or not (responder.finished or self._transport.is_closing()):
            log.error("a request was not answered to its end", exc_info=error)
            if responder.status:
                self.abort()
                return
            sentence = "the router has failed to answer; its log says more"
            responder.reply(500, self._shared.error_body(500, sentence))
        if self._transport.is_closing():
            return
        self._shared.metrics.http_answered(responder.status)
        if self._leaving or self._shared.draining or not responder.keep_alive:
            self._close()
        else:
            self._transport.resume_reading()
            self._next()

    def _wait_for_request(self) -> None:
        limits = self._shared.limits
        if not self._reader.num_received:
            self._receiving = False
            self.deadline = self._shared.now + limits.idle_s
        elif not self._receiving:
            self._receiving = True
            self.deadline = self._shared.now + limits.receive_s
        if self._reader.wants_continue:
            self._reader.wants_continue = False
            self._transport.write(_CONTINUE)

    def _read_no_further(self) -> None:
        """A client that sends more before it has its answer waits, and should it go away that is
        seen late. Of all others it is seen at once, since their sockets are still read."""
        if self._ahead or self._reader.num_received:
            self._transport.pause_reading()

    def _turn_away(self, status: int, sentence: str) -> None:
        """Nothing more can be read from this client: tells it why, unless it is being answered."""
        self._leaving = True
        self._ahead.clear()
        self._count_arriving(0)
        if self._answering is not None:
            return
        responder = Responder(
            self._transport, self._writable, _NO_REQUEST, date=self._shared.date, keep_alive=False
        )
        headers = (("retry-after", "1"),) if status == 503 else ()
        responder.reply(status, self._shared.error_body(status, sentence), JSON, headers)
        self._shared.metrics.http_answered(status)
        peer = peer_address(self._transport)
        log.info("client turned away %s", kv(peer=peer, status=status, because=sentence))
        # Closed with unread bytes, the socket would take the answer back. TLS has no such half of
        # a connection, and an end of its own, which waits for the client's.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self.deadline = self._shared.now + self._shared.limits.linger_s

    def _close(self) -> None:
        """After what is written; a client that does not read it has until the deadline."""
        self._leaving = True
        self.deadline = self._shared.now + self._shared.limits.idle_s
        self._transport.close()

    def _count_arriving(self, num_bytes: int) -> None:
        self._shared.num_arriving += num_bytes - self._num_arriving
        self._num_arriving = num_bytes
