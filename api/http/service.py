"""The callbacks of aiohttp: a request whose head has arrived, or bytes that are not a request."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, StreamReader, web

from api.http.acceptor import HttpAcceptor
from api.http.answers import Headers, whole
from api.http.request import Check, Handler, HttpRequest
from api.http.shared import HttpContext, HttpPeer

# aiohttp parses at most twice as much of a body ahead of its reader, and at most 1024 chunks.
_READ_BYTES = 16 << 10
_BUG = "the router has failed to answer; its log says more"


class RequestChecks(Protocol):
    """Checks and headers of every request, independent of its path."""

    in_order: Sequence[Check]  # called in this order, before the body is read

    def headers(self, request: HttpRequest) -> Headers:
        """Return headers to add to the response."""

    def closed(self, peer: HttpPeer) -> None:
        """Note that the connection has ended."""


class HttpService:
    """Serving of requests. For one event loop."""

    def __init__(
        self, shared: HttpContext, route: Callable[[HttpRequest], Handler], checks: RequestChecks
    ) -> None:
        self._shared = shared
        self._route = route
        self._checks = checks
        self._aiohttp = web.Server(
            self._answer,  # type: ignore[arg-type]  # its requests are what `_request` makes
            request_factory=_request,
            handler_cancellation=True,
        )

    def door(self) -> HttpAcceptor:
        """Make the HttpAcceptor of one connection."""
        return HttpAcceptor(self._shared, self._conversation, self._checks.closed)

    def _conversation(self, door: HttpAcceptor) -> asyncio.Protocol:
        return _Conversation(door, self._aiohttp, self._shared)

    async def _answer(self, request: HttpRequest) -> web.StreamResponse:
        """Write the whole response. Cancelled when the client disconnects."""
        request.answer_headers = (*self._checks.headers(request), ("server", "baton"))
        try:
            response = await self._response(request)
            if not response.prepared:
                response.headers.extend(request.answer_headers)
            await response.prepare(request)
            self._shared.metrics.http_answered(response.status)
            await response.write_eof()
        except BadRequest as bad:
            request.door.turn_away(bad.status, str(bad))
            return web.Response()  # never sent
        except ConnectionError:
            return web.Response()  # never sent: the client has disconnected
        request.door.answered()
        return response

    async def _response(self, request: HttpRequest) -> web.StreamResponse:
        """Return the response.

        Raise BadRequest, or ConnectionError after the client has disconnected.
        """
        try:
            return self._refused(request) or await self._handled(request)
        except (BadRequest, ConnectionError):
            raise
        except Exception as error:
            self._shared.log.error("response incomplete", exc_info=error)
            if request.writer.output_size:  # part of the response has been sent
                request.door.abort()
            return whole(500, self._shared.error_body(500, _BUG))

    def _refused(self, request: HttpRequest) -> web.Response | None:
        refused = next((r for check in self._checks.in_order if (r := check(request))), None)
        if refused is not None and not request.content.is_eof():
            request.door.forget()
        return refused

    async def _handled(self, request: HttpRequest) -> web.StreamResponse:
        cast(_Conversation, request.protocol).expect(request.content)
        request.body = await whole_body(request, self._shared.limits.max_body_bytes)
        request.door.answering(len(request.body))
        return await self._route(request)(request)


class _Conversation(web.RequestHandler):
    """aiohttp's handler of one connection. The HttpAcceptor enforces all time limits instead."""

    def __init__(self, door: HttpAcceptor, server: web.Server, shared: HttpContext) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            tcp_keepalive=False,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=shared.limits.max_line_bytes,
            max_field_size=shared.limits.max_line_bytes,
            max_headers=shared.limits.max_headers,
            lingering_time=0.0,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
        )
        self.door = door
        self._body: StreamReader = EMPTY_PAYLOAD

    def expect(self, body: StreamReader) -> None:
        """Note the body that is read from now on."""
        self._body = body
        self.door.receive()
        self._heed_error()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._heed_error()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Reject bytes that are not a request."""
        self._turn_away(message or "")
        return web.Response()  # never sent

    def _heed_error(self) -> None:
        """Reject a body that aiohttp found malformed.

        Messages behind an unfinished body are never requests, only an error of that body. aiohttp
        would report the error after the end of the body, which never comes.
        """
        if self._messages and not self._body.is_eof():
            error, _ = self._messages.popleft()
            self._turn_away(getattr(error, "message", ""))

    def _turn_away(self, reason: str) -> None:
        reason = reason.partition("\n")[0].rstrip(": ")
        self.door.turn_away(400, f"this is not HTTP/1.1: {reason}")


def _request(message: Any, payload: StreamReader, protocol: Any, *others: Any) -> HttpRequest:
    loop = asyncio.get_running_loop()
    return HttpRequest(protocol.door, message, payload, protocol, *others, loop)


# Each piece of a body costs the same work, whatever its size. This limits the number of small ones.
_SMALL_BYTES, _MAX_SMALL = 64, 1000


class BadRequest(Exception):
    """An invalid request, or one beyond the limits.

    Nothing after it on the connection can be read.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def whole_body(request: HttpRequest, max_bytes: int) -> bytes:
    """Wait until the whole body has arrived, and return it.

    Raises:
        BadRequest: it is too long or comes in too many pieces. If the client sends the length, a
            body that is too long is rejected before it arrives.
    """
    if request.version not in (HttpVersion11, HttpVersion10):
        raise BadRequest(400, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    content = request.content
    if content is EMPTY_PAYLOAD:
        return b""
    if content.is_eof() and content.total_bytes <= max_bytes:
        return content.read_nowait()
    if _num_told(request) > max_bytes:
        raise _too_long(max_bytes)
    if request.header("expect").lower() == "100-continue":
        request.door.ask_for_body()
    body = bytearray()
    num_pieces = 0
    async for piece, _ in content.iter_chunks():
        body += piece
        num_pieces += 1
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
        if num_pieces > _MAX_SMALL + len(body) // _SMALL_BYTES:
            raise BadRequest(400, "a body in so many small pieces is not taken")
    return bytes(body)


def _num_told(request: HttpRequest) -> int:
    # The parser has checked that it is a number, but Python reads at most 4300 digits of one.
    return int(request.header("content-length").lstrip("0")[:20] or "0")


def _too_long(max_bytes: int) -> BadRequest:
    return BadRequest(413, f"the body of a request has at most {max_bytes} bytes")
