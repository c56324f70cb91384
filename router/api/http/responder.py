"""One answer to bytes: all at once, or piece by piece as fast as its client reads."""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

from router.api.http.request import Request

Headers = Iterable[tuple[str, str]]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"

_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
# Not in the standard, but what a client's own cancel is called everywhere.
_LINES[499] = "HTTP/1.1 499 Client Closed Request\r\n"


class Responder:
    """The answer to one request. Either one `reply`, or any pieces by `send` or `push` and one
    `finish`.

    After its client has gone everything here does nothing; its user is cancelled.
    """

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        writable: asyncio.Event,
        request: Request,
        *,
        date: str,
        keep_alive: bool,
        headers: Headers = (),
    ) -> None:
        """
        Args:
            writable: cleared while the client reads more slowly than we write.
            date: the header's value.
            headers: of whatever the answer will be, besides its own.
        """
        self._transport = transport
        self._writable = writable
        self._head_only = request.method == "HEAD"
        self._chunks = request.takes_chunks
        self._date = date
        self._headers = headers
        self.keep_alive = keep_alive  # whether the connection can go on after this answer
        self.status = 0  # until the answer has begun
        self.finished = False

    def reply(self, status: int, body: bytes, kind: str = JSON, headers: Headers = ()) -> None:
        """Writes a whole answer; of one with status 304 only the head.

        Args:
            kind: media type of `body`.
        """
        head = self._head(status, kind, (("content-length", str(len(body))), *headers))
        self.finished = True
        self._write(head if self._head_only or status == 304 else head + body)

    @property
    def slow(self) -> bool:
        """Whether the client leaves so much unread that no more should be written."""
        return not self._writable.is_set()

    def push(self, piece: bytes, kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        """Writes a piece of the answer, the head before the first one. For a client that is not
        slow."""
        self._write(self._begun(kind, headers) + self._framed(piece))

    async def send(self, piece: bytes, kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        """As `push`, and waits while the client is slow: no writer is ever more than one piece
        ahead of what the transport holds."""
        self.push(piece, kind, headers)
        if not self._writable.is_set():
            await self._writable.wait()

    def finish(self, piece: bytes = b"", kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        """Writes the last piece of the answer and its end."""
        end = b"0\r\n\r\n" if self._chunks else b""
        data = self._begun(kind, headers) + self._framed(piece) + end
        self.finished = True
        self._write(data)

    def _begun(self, kind: str, headers: Headers) -> bytes:
        """The head, if it has not been written yet."""
        if self.status:
            return b""
        if self._chunks:
            return self._head(200, kind, (("transfer-encoding", "chunked"), *headers))
        self.keep_alive = False  # the end of the connection is the end of the answer
        return self._head(200, kind, headers)

    def _head(self, status: int, kind: str, headers: Headers) -> bytes:
        self.status = status
        lines = [_LINES[status], f"date: {self._date}\r\ncontent-type: {kind}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in (*self._headers, *headers)]
        if not self.keep_alive:
            lines.append("connection: close\r\n")
        elif not self._chunks:
            lines.append("connection: keep-alive\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1")

    def _framed(self, piece: bytes) -> bytes:
        if not self._chunks or not piece:
            return piece
        return b"%x\r\n%b\r\n" % (len(piece), piece)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
