"""Server-sent events as an answer, and what becomes of them where there will be no answer."""

from aiohttp import web

from api.dialect.problems import Refusal
from api.http.answers import EVENT_STREAM, Headers, Stream
from api.http.request import Request

DONE = b"data: [DONE]\n\n"


class Events:
    """Of one answer. Each event is whole, with the empty line that ends it."""

    def __init__(self, request: Request, headers: Headers) -> None:
        self._headers = headers
        self._stream = Stream(
            request,
            EVENT_STREAM,
            (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers),
        )

    @property
    def slow(self) -> bool:
        """Whether the client leaves so much unread that no more should be written."""
        return self._stream.slow

    def push(self, event: bytes) -> None:
        """At once; for a client that is not slow. Nothing happens for b""."""
        if event:
            self._stream.push(event)

    async def send(self, event: bytes) -> None:
        """As `push`, and waits while the client is slow."""
        if event:
            await self._stream.send(event)

    def finish(self, event: bytes) -> None:
        """The last one."""
        self._stream.finish(event)

    def response(self) -> web.StreamResponse:
        return self._stream

    def failed(self, why: Refusal, last: bytes | None = None) -> web.StreamResponse:
        """What the client gets where something has gone wrong.

        Args:
            last: the event that says so, if some have been sent. None: the refusal itself, without
                [DONE], so that no client takes this for the whole answer.
        """
        if self._stream.finished:  # one choice only waited for a slow client to take its end
            return self._stream
        if not self._stream.prepared:
            return why.response(self._headers)
        self._stream.finish(b"data: " + why.body + b"\n\n" if last is None else last)
        return self._stream
