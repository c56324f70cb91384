"""Bytes to whole requests, within limits. Holds no socket and no clock."""

from collections.abc import Mapping

import httptools
import msgspec


class Request(msgspec.Struct, frozen=True):
    """One request with its whole body."""

    method: str
    path: str  # as sent, without the query
    headers: Mapping[bytes, bytes]  # names in lower case; of a repeated one the last
    body: bytes
    takes_chunks: bool  # whether its client understands an answer in chunks: HTTP/1.1
    keep_alive: bool


class BadRequest(Exception):
    """What a client sent is no request, or more than is taken. Nothing after it can be read."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Draft(msgspec.Struct):
    """A request that is being received."""

    url: bytes = b""
    headers: dict[bytes, bytes] = {}
    num_head_bytes: int = 0
    head_complete: bool = False
    body: list[bytes] = []


class RequestReader:
    """The requests of one connection. Useless once it has raised."""

    def __init__(self, *, max_head_bytes: int, max_body_bytes: int) -> None:
        """
        Args:
            max_head_bytes: of request line, headers and trailers together.
            max_body_bytes: of a body, its chunks' framing included.
        """
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._draft = _Draft()
        self._complete: list[Request] = []
        self._refusal: BadRequest | None = None
        self.num_received = 0  # bytes of the request that is not complete
        self.wants_continue = False  # its client sends the body once it has been asked for it

    def feed(self, data: bytes) -> list[Request]:
        """The requests that `data` completes.

        Raises:
            BadRequest: this is no HTTP, or beyond the limits.
        """
        self.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            if self._refusal is None:
                raise
            raise self._refusal from None
        except httptools.HttpParserUpgrade:
            raise BadRequest(400, "CONNECT and Upgrade are not supported") from None
        except httptools.HttpParserError as error:
            raise BadRequest(400, f"this is not HTTP/1.1: {error}") from None
        if self.num_received > self._max_head_bytes:
            if not self._draft.head_complete:
                raise self._too_long_head()
            if self.num_received > self._max_head_bytes + self._max_body_bytes:
                raise self._too_long_body()
        complete, self._complete = self._complete, []
        return complete

    # What httptools calls. An error raised there ends its work. -----------------------------------

    def on_message_begin(self) -> None:
        self._draft = _Draft()
        if not self.num_received:
            self.num_received = 1  # or more: it came with the end of the one before

    def on_url(self, url: bytes) -> None:
        self._draft.url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if not self._draft.head_complete:  # else it is a trailer
            self._draft.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._draft.head_complete = True
        headers = self._draft.headers
        # The parser has found it to be a number, but Python reads no more than 4300 digits of one.
        length = headers.get(b"content-length", b"").strip().lstrip(b"0")
        if int(length or b"0") > self._max_body_bytes:
            self._refuse(self._too_long_body())
        self.wants_continue = headers.get(b"expect", b"").lower() == b"100-continue"

    def on_body(self, body: bytes) -> None:
        self.wants_continue = False
        self._draft.body.append(body)

    def on_message_complete(self) -> None:
        self.wants_continue = False
        self.num_received = 0
        draft = self._draft
        self._complete.append(
            Request(
                method=self._parser.get_method().decode("ascii"),
                path=draft.url.partition(b"?")[0].decode("latin-1"),
                headers=draft.headers,
                body=b"".join(draft.body),
                takes_chunks=self._parser.get_http_version() == "1.1",
                keep_alive=self._parser.should_keep_alive(),
            )
        )

    def _count_head(self, num_bytes: int) -> None:
        self._draft.num_head_bytes += num_bytes
        if self._draft.num_head_bytes > self._max_head_bytes:
            self._refuse(self._too_long_head())

    def _refuse(self, refusal: BadRequest) -> None:
        self._refusal = refusal
        raise refusal

    def _too_long_head(self) -> BadRequest:
        return BadRequest(431, f"the head of a request has at most {self._max_head_bytes} bytes")

    def _too_long_body(self) -> BadRequest:
        return BadRequest(413, f"the body of a request has at most {self._max_body_bytes} bytes")
