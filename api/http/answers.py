"""Answers: all at once, or piece by piece as fast as the client reads."""

from collections.abc import Coroutine, Iterable
from typing import Any

from aiohttp import HttpVersion11, web

from api.http.request import Request

Headers = Iterable[tuple[str, str]]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"

# Not in the standard, but what a client's own cancel is called everywhere.
_REASONS = {499: "Client Closed Request"}


def whole(status: int, body: bytes, kind: str = JSON, headers: Headers = ()) -> web.Response:
    """
    Args:
        kind: media type of `body`.
    """
    fields = [("content-type", kind), *headers]
    return web.Response(status=status, reason=_REASONS.get(status), body=body, headers=fields)


class Stream(web.StreamResponse):
    """Any pieces by `send` or `push`, and one `finish`. The head is written with the first piece.

    After its client has gone everything here does nothing; its user is cancelled.
    """

    # aiohttp's own: else the head would be a packet of its own.
    _send_headers_immediately = False

    def __init__(self, request: Request, kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        """
        Args:
            request: that it answers.
        """
        super().__init__(headers=[("content-type", kind), *headers])
        self._request = request
        self._last = b""
        self.finished = False
        if request.version < HttpVersion11:  # the end of the connection is the end of the answer
            self.force_close()

    @property
    def slow(self) -> bool:
        """Whether the client leaves so much unread that no more should be written."""
        return bool(self._request.protocol.writing_paused)

    def push(self, piece: bytes) -> None:
        """Writes a piece, at once. For a client that is not slow."""
        try:
            if not self.prepared:
                self.headers.extend(self._request.answer_headers)
                _at_once(self.prepare(self._request))
            _at_once(self._request.writer.write(piece, drain=False))  # type: ignore[call-arg]
        except ConnectionError:
            return

    async def send(self, piece: bytes) -> None:
        """As `push`, and waits while the client is slow: no writer is ever more than one piece
        ahead of what the transport holds."""
        self.push(piece)
        await self._request.writer.drain()

    def finish(self, piece: bytes = b"") -> None:
        """The last piece, which is written with the answer's end."""
        self._last = piece
        self.finished = True

    async def write_eof(self, data: bytes = b"") -> None:
        """aiohttp's, after the handler: the end."""
        last, self._last = self._last + data, b""
        await super().write_eof(last)


def _at_once(writing: Coroutine[Any, Any, object]) -> None:
    """Runs what is a coroutine, but has nothing to wait for."""
    try:
        writing.send(None)
    except StopIteration:
        return
    writing.close()
    raise RuntimeError("a write that need not wait has waited")
