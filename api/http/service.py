"""The HTTP listener, TLS handshakes, and the glue between aiohttp and handlers."""

import asyncio
import contextlib
import math
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, StreamReader, web

from api.auth.fair_slots import ConnectionSlot
from api.http.acceptor import HttpAcceptor, HttpContext, HttpPeer, peer_of
from api.http.messages import Check, Handler, Headers, HttpRequest, whole
from common.errors import ConfigError
from common.rpc import join_address

# aiohttp buffers at most twice this much of a body, in at most 1024 chunks.
_READ_BYTES = 16 << 10
_BUG = "internal error of the router: see its log"


class RequestChecks(Protocol):
    """Checks and headers that apply to every request, whatever its path."""

    in_order: Sequence[Check]  # called in this order, before the body is read

    def headers(self, request: HttpRequest) -> Headers:
        """Return headers to add to the response."""

    def closed(self, peer: HttpPeer) -> None:
        """Process the end of a connection."""


class HttpService:
    """Passes each request to its checks and its handler. For one event loop."""

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

    def acceptor(self) -> HttpAcceptor:
        return HttpAcceptor(self._shared, self._conversation, self._checks.closed)

    def _conversation(self, acceptor: HttpAcceptor) -> asyncio.Protocol:
        return _Conversation(acceptor, self._aiohttp, self._shared)

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
            request.acceptor.reject(bad.status, str(bad))
            return web.Response()  # never sent
        except ConnectionError:
            return web.Response()  # never sent: the client has disconnected
        request.acceptor.answered()
        return response

    async def _response(self, request: HttpRequest) -> web.StreamResponse:
        """Return the response of the checks or the handler.

        Raises BadRequest, or ConnectionError after the client has disconnected.
        """
        try:
            return self._refused(request) or await self._handled(request)
        except (BadRequest, ConnectionError):
            raise
        except Exception as error:
            self._shared.log.error("response incomplete", exc_info=error)
            if request.writer.output_size:  # part of the response has been sent
                request.acceptor.abort()
            return whole(500, self._shared.error_body(500, _BUG))

    def _refused(self, request: HttpRequest) -> web.Response | None:
        refused = next((r for check in self._checks.in_order if (r := check(request))), None)
        if refused is not None and not request.content.is_eof():
            request.acceptor.forget()
        return refused

    async def _handled(self, request: HttpRequest) -> web.StreamResponse:
        cast(_Conversation, request.protocol).expect(request.content)
        request.body = await whole_body(request, self._shared.limits.max_body_bytes)
        request.acceptor.answering(len(request.body))
        return await self._route(request)(request)


class _Conversation(web.RequestHandler):
    """aiohttp's handler of one connection. Its time limits are replaced by the HttpAcceptor's."""

    def __init__(self, acceptor: HttpAcceptor, server: web.Server, shared: HttpContext) -> None:
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
        self.acceptor = acceptor
        self._body: StreamReader = EMPTY_PAYLOAD

    def expect(self, body: StreamReader) -> None:
        """Record the body that is read from now on."""
        self._body = body
        self.acceptor.receive()
        self._check_error()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_error()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Reject bytes that are not an HTTP request."""
        self._reject(message or "")
        return web.Response()  # never sent

    def _check_error(self) -> None:
        """Reject a body that aiohttp found malformed.

        Messages that follow an unfinished body are never requests, but an error of that body.
        aiohttp would report the error only at the end of the body, which never comes.
        """
        if self._messages and not self._body.is_eof():
            error, _ = self._messages.popleft()
            self._reject(getattr(error, "message", ""))

    def _reject(self, reason: str) -> None:
        reason = reason.partition("\n")[0].rstrip(": ")
        self.acceptor.reject(400, f"this is not HTTP/1.1: {reason}")


def _request(message: Any, payload: StreamReader, protocol: Any, *others: Any) -> HttpRequest:
    loop = asyncio.get_running_loop()
    return HttpRequest(protocol.acceptor, message, payload, protocol, *others, loop)


# Each chunk of a body costs the same work, whatever its size. This limits the number of small
# chunks.
_SMALL_BYTES, _MAX_SMALL = 64, 1000


class BadRequest(Exception):
    """An invalid request, or one beyond the limits. The rest of the connection cannot be read."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def whole_body(request: HttpRequest, max_bytes: int) -> bytes:
    """Wait until the whole body has arrived, and return it.

    Raises:
        BadRequest: it is too long or has too many chunks. If the client sends the length, a body
            that is too long is rejected before it arrives.
    """
    if request.version not in (HttpVersion11, HttpVersion10):
        raise BadRequest(400, "only HTTP/1.1 and HTTP/1.0 are supported")
    content = request.content
    if content is EMPTY_PAYLOAD:
        return b""
    if content.is_eof() and content.total_bytes <= max_bytes:
        return content.read_nowait()
    if _content_length(request) > max_bytes:
        raise _too_long(max_bytes)
    if request.header("expect").lower() == "100-continue":
        request.acceptor.ask_for_body()
    body = bytearray()
    num_pieces = 0
    async for piece, _ in content.iter_chunks():
        body += piece
        num_pieces += 1
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
        if num_pieces > _MAX_SMALL + len(body) // _SMALL_BYTES:
            raise BadRequest(400, "the body has too many small chunks")
    return bytes(body)


def _content_length(request: HttpRequest) -> int:
    # The parser has checked that it is a number, but Python reads at most 4300 digits of one.
    return int(request.header("content-length").lstrip("0")[:20] or "0")


def _too_long(max_bytes: int) -> BadRequest:
    return BadRequest(413, f"the body of a request may have at most {max_bytes} bytes")


# A handshake counts as a connection and has a deadline, so a silent client does not occupy a place
# for long.
class Handshake(asyncio.Protocol):
    """A client's connection during its TLS handshake. Then an HttpAcceptor takes over.

    Args:
        acceptor: makes the HttpAcceptor that takes over the connection.
        context: returns the TLS context. Called once per handshake.
    """

    def __init__(
        self,
        shared: HttpContext,
        acceptor: Callable[[], HttpAcceptor],
        context: Callable[[], ssl.SSLContext],
    ) -> None:
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
        """Let the handshake complete. The connection may have one request."""

    def abort(self) -> None:
        self._shaking.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Move the socket out of the transport before anything is read.

        The event loop reports a failed handshake only for a socket that its caller passes in.
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


_BACKLOG = 1024
_MAX_UNSENT_BYTES = 64 << 10  # in the kernel, beyond the client's receive window
# A host that disappears silently is detected after the sum of these.
_SILENT_S, _PROBE_S, _PROBES = 15, 5, 3


class HttpServer:
    """The HTTP server of one event loop. Call `start` once, and `stop` at the end."""

    def __init__(
        self,
        shared: HttpContext,
        service: HttpService,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._shared = shared
        self._service = service
        self._tls_context = tls_context
        self._listener: asyncio.Server | None = None
        self._accepting: asyncio.Future[None] | None = None  # accepting the last connections
        self._next_tick: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen, and return the port.

        Args:
            port: 0: the system chooses one.
            shares_port: other processes share the port, as in common.rpc.bind.

        Raises:
            ConfigError: the address is not available.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._protocol, host, port, backlog=_BACKLOG, reuse_port=shares_port or None
            )
        except OSError as error:
            address = join_address(host, port)
            # uvloop's message repeats the address.
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"--http-port: cannot listen on {address}: {reason}") from error
        for listener in self._listener.sockets:
            _set_options(listener.fileno())
        self._tick()
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Stop accepting connections, except those that the kernel has completed already.

        If processes share a port, the clients of these connections cannot know that this one stops.
        """
        if self._listener is None:
            return
        copies = [socket.socket(fileno=os.dup(each.fileno())) for each in self._listener.sockets]
        self._listener.close()
        self._listener = None
        waiting: list[socket.socket] = []
        for listener in copies:
            with listener, contextlib.suppress(OSError):  # no more connections, or no descriptors
                while len(waiting) < _BACKLOG:
                    waiting.append(listener.accept()[0])
        self._accepting = asyncio.ensure_future(self._accept(waiting))

    async def _accept(self, clients: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for client in clients:
            client.setblocking(False)
            await loop.connect_accepted_socket(self._protocol, client)

    def drain(self) -> None:
        """Close each connection after its current response, and idle connections immediately.

        A connection that has had no request gets a short time for its first one, which may be on
        its way.
        """
        self._shared.draining = True
        for member in list(self._shared.members):
            member.drain()

    async def wait_until_all_gone(self, longest_s: float) -> None:
        """Wait until all connections have ended, for at most `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                if self._accepting is not None:
                    await self._accepting
                await self._shared.all_gone.wait()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections, give responses `grace_s` seconds, and end the rest."""
        self.stop_listening()
        self.drain()
        await self.wait_until_all_gone(grace_s)
        for member in list(self._shared.members):
            member.abort()
        if self._next_tick is not None:
            self._next_tick.cancel()

    def _protocol(self) -> HttpAcceptor | Handshake:
        if self._tls_context is None:
            return self._service.acceptor()
        return Handshake(self._shared, self._service.acceptor, self._tls_context)

    def _tick(self) -> None:
        self._shared.tick()
        loop = asyncio.get_running_loop()
        self._next_tick = loop.call_later(self._shared.limits.tick_s, self._tick)


def _set_options(listener: int) -> None:
    """Set socket options of a listener, which accepted connections inherit."""
    with socket.socket(fileno=os.dup(listener)) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _SILENT_S),
            (socket.TCP_KEEPINTVL, _PROBE_S),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES),
        ):
            shared.setsockopt(socket.IPPROTO_TCP, option, value)
