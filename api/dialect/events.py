"""Replies to a request: one whole body, or server-sent events, and their handling of errors."""

from collections.abc import Callable

from aiohttp import web

from api.dialect.problems import ApiError
from api.http.answers import EVENT_STREAM, Headers, HttpStream, whole
from api.http.request import HttpRequest
from api.requests.answer import FinalChunk, OutputChunk

DONE = b"data: [DONE]\n\n"


class EventStream:
    """The event stream of one response.

    Each event is complete, with the empty line that ends it.
    """

    def __init__(self, request: HttpRequest, headers: Headers) -> None:
        self._headers = headers
        self._stream = HttpStream(
            request,
            EVENT_STREAM,
            (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers),
        )

    @property
    def slow(self) -> bool:
        """Return whether the client leaves so much unread that writing should pause."""
        return self._stream.slow

    def push(self, event: bytes) -> None:
        """Write an event immediately. Only for a client that is not slow. b"" is ignored."""
        if event:
            self._stream.push(event)

    async def send(self, event: bytes) -> None:
        """Write an event as `push` does, and wait while the client is slow."""
        if event:
            await self._stream.send(event)

    def finish(self, event: bytes) -> None:
        """Write the last event."""
        self._stream.finish(event)

    def response(self) -> web.StreamResponse:
        return self._stream

    def failed(self, why: ApiError, last: bytes | None = None) -> web.StreamResponse:
        """Return the response after an error.

        Args:
            last: the event that reports the error, if events have been sent. None: the error body
                itself, without [DONE], so that no client takes the response for complete.
        """
        if self._stream.finished:  # only a slow client kept the one choice waiting
            return self._stream
        if not self._stream.prepared:
            return why.response(self._headers)
        self._stream.finish(b"data: " + why.body + b"\n\n" if last is None else last)
        return self._stream


class WholeReply:
    """An EndpointReply with one body at the end."""

    def __init__(
        self,
        add: Callable[[int, OutputChunk], None],
        body: Callable[[], bytes],
        headers: Headers,
    ) -> None:
        """
        Args:
            add: called with each piece and the index of its choice.
            body: called after all choices have ended.
        """
        self._add = add
        self._body = body
        self._headers = headers

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        self._add(index, piece)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        self._add(index, piece)
        return True

    def response(self) -> web.StreamResponse:
        return whole(200, self._body(), headers=self._headers)

    def failed(self, why: ApiError) -> web.StreamResponse:
        return why.response(self._headers)


class StreamedReply:
    """An EndpointReply with server-sent events."""

    def __init__(
        self,
        event: Callable[[int, OutputChunk], bytes],
        end: Callable[[], bytes],
        num_choices: int,
        stream: EventStream,
        failure: Callable[[ApiError], bytes | None] = lambda why: None,
    ) -> None:
        """
        Args:
            event: returns the events of each piece, given the index of its choice.
            end: returns the events after all choices have ended.
            failure: returns the event that ends the stream after an error, see EventStream.failed.
        """
        self._event = event
        self._end = end
        self._num_left = num_choices
        self._stream = stream
        self._failure = failure

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        event = self._event(index, piece)
        self._num_left -= isinstance(piece, FinalChunk)
        if self._num_left:
            await self._stream.send(event)
        else:
            self._stream.finish(event + self._end())

    def offer(self, index: int, piece: OutputChunk) -> bool:
        if self._stream.slow:
            return False
        self._stream.push(self._event(index, piece))
        return True

    def response(self) -> web.StreamResponse:
        return self._stream.response()

    def failed(self, why: ApiError) -> web.StreamResponse:
        return self._stream.failed(why, self._failure(why))
