"""Server-sent events of a response, and their handling of errors."""

from aiohttp import web

from api.dialect.problems import ApiError
from api.http.answers import EVENT_STREAM, Headers, HttpStream
from api.http.request import HttpRequest

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
