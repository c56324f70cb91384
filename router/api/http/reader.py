"""Bytes to whole requests, within limits. Holds no socket and no clock."""

from collections.abc import Callable, Sequence

import httptools
import msgspec

from router.api.http.request import BadRequest, Check, Head, Peer, Refused, Request

# Of what is read at once where nothing tells how long a request is: a client that sends many
# requests ahead makes few of them objects.
_SLICE_BYTES = 1 << 10
# Every piece of a body costs the same work, whatever is in it: so many may be small.
_SMALL_BYTES, _MAX_SMALL = 64, 1000


class _Draft(msgspec.Struct):
    """A request that is being received."""

    url: bytes = b""
    headers: dict[bytes, bytes] = {}
    num_head_bytes: int = 0
    head_complete: bool = False
    num_left: int = 0  # of the body, if its client has told its length
    body: bytearray = msgspec.field(default_factory=bytearray)
    num_pieces: int = 0  # in which the body has come
    refused: Refused | None = None


class RequestReader:
    """The requests of one connection. Useless once it has raised or refused."""

    def __init__(
        self,
        *,
        max_head_bytes: int,
        max_body_bytes: int,
        checks: Sequence[Check],
        peer: Peer,
        on_taken: Callable[[], None],
    ) -> None:
        """
        Args:
            max_head_bytes: of request line, headers and trailers together.
            max_body_bytes: of a body, its chunks' framing included.
            checks: asked in this order as soon as a head is there; the first refusal counts.
            on_taken: called when a request's body has been taken.
        """
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._checks = checks
        self._peer = peer
        self._on_taken = on_taken
        self._parser = httptools.HttpRequestParser(self)
        self._draft = _Draft()
        self._complete: list[Request] = []
        self._wrong: BadRequest | None = None
        self.num_received = 0  # bytes of the request that is not complete
        self.wants_continue = False  # its client sends the body once it has been asked for it
        self.refused = False  # a request whose body has not come: nothing after it can be read

    def feed(self, data: memoryview) -> tuple[list[Request], memoryview]:
        """Reads until requests are complete, seldom more than one.

        Returns:
            Them, and what of `data` has not been read.

        Raises:
            BadRequest: this is no HTTP, or beyond the limits.
        """
        while data and not self._complete:
            num_next = self._draft.num_left or _SLICE_BYTES
            self._feed(data[:num_next])
            data = data[num_next:]
        complete, self._complete = self._complete, []
        return complete, data

    def forget(self) -> None:
        """Drops what has been received, now: the parser and this hold each other. Nothing may be
        fed any more."""
        self._draft = _Draft()
        self._complete = []

    def _feed(self, data: memoryview) -> None:
        self.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            if self._wrong is None:
                raise
            raise self._wrong from None
        except httptools.HttpParserUpgrade:
            raise BadRequest(400, "CONNECT and Upgrade are not supported") from None
        except httptools.HttpParserError as error:
            raise BadRequest(400, f"this is not HTTP/1.1: {error}") from None
        if self._draft.refused is not None and not self._complete:
            self.refused = True
            self._finish(keep_alive=False)
        elif self.num_received > self._max_head_bytes:
            if not self._draft.head_complete:
                raise self._too_long_head()
            if self.num_received > self._max_head_bytes + self._max_body_bytes:
                raise self._too_long_body()

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
        draft = self._draft
        draft.head_complete = True
        # The parser has found it to be a number, but Python reads no more than 4300 digits of one.
        length = draft.headers.get(b"content-length", b"").strip().lstrip(b"0")
        draft.num_left = int(length or b"0")
        draft.refused = self._refused()
        if draft.num_left > self._max_body_bytes:
            self._end(self._too_long_body())
        self.wants_continue = draft.headers.get(b"expect", b"").lower() == b"100-continue"

    def on_body(self, body: bytes) -> None:
        self.wants_continue = False
        draft = self._draft
        draft.num_left = max(0, draft.num_left - len(body))
        draft.body += body
        draft.num_pieces += 1
        if draft.num_pieces > _MAX_SMALL + len(draft.body) // _SMALL_BYTES:
            self._end(BadRequest(400, "a body in so many small pieces is not taken"))

    def on_message_complete(self) -> None:
        self._finish(self._parser.should_keep_alive())

    # ----------------------------------------------------------------------------------------------

    def _refused(self) -> Refused | None:
        if not self._checks:
            return None
        head = Head(self._method(), self._path(), self._draft.headers, self._peer)
        return next((refused for check in self._checks if (refused := check(head))), None)

    def _finish(self, keep_alive: bool) -> None:
        self.wants_continue = False
        self.num_received = 0
        self._complete.append(
            Request(
                self._method(),
                self._path(),
                self._draft.headers,
                bytes(self._draft.body),
                takes_chunks=self._parser.get_http_version() == "1.1",
                keep_alive=keep_alive,
                peer=self._peer,
                refused=self._draft.refused,
                on_taken=self._on_taken,
            )
        )
        self._draft = _Draft()

    def _method(self) -> str:
        return self._parser.get_method().decode("ascii")

    def _path(self) -> str:
        return self._draft.url.partition(b"?")[0].decode("latin-1")

    def _count_head(self, num_bytes: int) -> None:
        self._draft.num_head_bytes += num_bytes
        if self._draft.num_head_bytes > self._max_head_bytes:
            self._end(self._too_long_head())

    def _end(self, wrong: BadRequest) -> None:
        self._wrong = wrong
        raise wrong

    def _too_long_head(self) -> BadRequest:
        return BadRequest(431, f"the head of a request has at most {self._max_head_bytes} bytes")

    def _too_long_body(self) -> BadRequest:
        return BadRequest(413, f"the body of a request has at most {self._max_body_bytes} bytes")
