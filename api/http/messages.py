"""One HTTP request and response as handlers see them: aiohttp's, over an HttpAcceptor."""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from aiohttp import HttpVersion11, web

from api.http.acceptor import ErrorBody, HttpAcceptor, HttpPeer


class HttpRequest(web.BaseRequest):
    """An HTTP request. Its whole body has arrived, and can be taken once."""

    def __init__(self, acceptor: HttpAcceptor, *parts: Any) -> None:
        super().__init__(*parts)
        self.acceptor = acceptor
        # As sent, without the query, so that access checks and routing read the same path.
        self.route = self.rel_url.raw_path
        self.answer_headers: tuple[tuple[str, str], ...] = ()  # headers added to any response
        self.body = b""

    @property
    def keep_alive(self) -> bool:
        """Return whether the connection stays open. aiohttp reads it when it writes the head."""
        return super().keep_alive and self.acceptor.reusable

    @property
    def peer(self) -> HttpPeer:
        return self.acceptor.peer

    def header(self, name: str) -> str:
        """Return a header's value, or "".

        Bytes that are not UTF-8 are read as latin-1, so that the value can be sent again.
        """
        value = self.headers.get(name, "")
        if value.isascii():
            return value
        sent = value.encode("utf-8", "surrogateescape")  # as aiohttp has decoded it
        try:
            return sent.decode()
        except UnicodeDecodeError:
            return sent.decode("latin-1")

    def take_body(self) -> bytes:
        """Return the body, and drop this object's reference to free its memory early."""
        body, self.body = self.body, b""
        self.acceptor.body_taken()
        return body


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[web.StreamResponse]]
# Returns a response instead of the handler's, before the body is read, or None.
Check: TypeAlias = Callable[[HttpRequest], web.Response | None]


Headers = Iterable[tuple[str, str]]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"

# Not a standard status. Commonly used for a request that its client cancelled.
_REASONS = {499: "Client Closed Request"}


def whole(status: int, body: bytes, kind: str = JSON, headers: Headers = ()) -> web.Response:
    """Return a whole response.

    Args:
        kind: media type of `body`.
    """
    fields = [("content-type", kind), *headers]
    return web.Response(status=status, reason=_REASONS.get(status), body=body, headers=fields)


class HttpStream(web.StreamResponse):
    """A streamed response: pieces by `send` or `push`, and one `finish`.

    The head is written with the first piece. After the client has disconnected, all methods do
    nothing and the caller is cancelled.
    """

    # An option of aiohttp: otherwise the head would be a packet of its own.
    _send_headers_immediately = False

    def __init__(
        self, request: HttpRequest, kind: str = EVENT_STREAM, headers: Headers = ()
    ) -> None:
        super().__init__(headers=[("content-type", kind), *headers])
        self._request = request
        self._last = b""
        self.finished = False
        if request.version < HttpVersion11:  # HTTP/1.0: the end of the connection ends the response
            self.force_close()

    @property
    def slow(self) -> bool:
        """Return whether the client leaves so much output unread that writing should pause."""
        return bool(self._request.protocol.writing_paused)

    def push(self, piece: bytes) -> None:
        """Write a piece without waiting. Only while the client is not slow."""
        try:
            if not self.prepared:
                self.headers.extend(self._request.answer_headers)
                _at_once(self.prepare(self._request))
            _at_once(self._request.writer.write(piece, drain=False))  # type: ignore[call-arg]
        except ConnectionError:
            return

    async def send(self, piece: bytes) -> None:
        """Write a piece as `push` does, and wait while the client is slow.

        So no writer is more than one piece ahead of the transport's buffer.
        """
        self.push(piece)
        await self._request.writer.drain()

    def finish(self, piece: bytes = b"") -> None:
        """Set the last piece, which is written with the end of the response."""
        self._last = piece
        self.finished = True

    async def write_eof(self, data: bytes = b"") -> None:
        """Write the last piece and the end. aiohttp calls this after the handler."""
        last, self._last = self._last + data, b""
        await super().write_eof(last)


def _at_once(writing: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that never waits."""
    try:
        writing.send(None)
    except StopIteration:
        return
    writing.close()
    raise RuntimeError("a write blocked that must complete at once")


class HttpRoutes:
    """Handlers by path and method. Other requests get 404 or 405.

    Args:
        exact: handlers by path and method. GET handlers also serve HEAD.
        below: handlers for all paths that begin with a key, which ends with "/", by method.
    """

    def __init__(
        self,
        exact: Mapping[str, Mapping[str, Handler]],
        below: Mapping[str, Mapping[str, Handler]],
        error_body: ErrorBody,
    ) -> None:
        self._exact = exact
        self._below = below
        self._error_body = error_body

    @property
    def paths(self) -> Sequence[str]:
        """Return every path or path prefix that is served."""
        return [*self._exact, *self._below]

    def __call__(self, request: HttpRequest) -> Handler:
        path = request.route
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return self._refusing(404, f"no such path: {path}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            sentence = f"{path} accepts {allowed}, not {request.method}"
            return self._refusing(405, sentence, (("allow", allowed),))
        return handler

    def _methods_below(self, path: str) -> Mapping[str, Handler] | None:
        return next((m for start, m in self._below.items() if path.startswith(start)), None)

    def _refusing(
        self, status: int, sentence: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> Handler:
        async def refuse(_: HttpRequest) -> web.Response:
            return whole(status, self._error_body(status, sentence), headers=headers)

        return refuse
