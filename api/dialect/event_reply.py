"""Replies of endpoints that stream named events: the stream, or the whole response at the end.

Independent of the response format of an endpoint.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from aiohttp import web

from api.dialect.endpoint_call import EndpointReply
from api.dialect.events import EventStream
from api.dialect.problems import ApiError
from api.http.answers import Headers, whole
from api.http.request import HttpRequest
from api.requests.answer import FinalChunk, OutputChunk

Event = dict[str, Any]  # has a "type", which determines its other fields
_encode = msgspec.json.Encoder().encode


class EventReply(Protocol):
    """One response in its endpoint's format.

    Attributes:
        last: the whole response, after it has ended.
    """

    last: Event

    def add(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        """Yield the events of this piece. The iterator must be exhausted, event by event.

        An event is valid only at the moment when it is yielded, because later events change its
        content.
        """
        ...

    def failed(self, why: ApiError) -> Event:
        """Return the event that ends a response after part of it has been sent."""
        ...


def reply_of(
    telling: EventReply, stream: bool, request: HttpRequest, headers: Headers
) -> EndpointReply:
    return _Streamed(telling, request, headers) if stream else _Whole(telling, headers)


class _Whole:
    """A reply with one JSON object at the end."""

    def __init__(self, telling: EventReply, headers: Headers) -> None:
        self._telling = telling
        self._headers = headers

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        self.offer(index, piece)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        for _ in self._telling.add(piece):
            pass
        return True

    def response(self) -> web.StreamResponse:
        return whole(200, _encode(self._telling.last), headers=self._headers)

    def failed(self, why: ApiError) -> web.StreamResponse:
        return why.response(self._headers)


class _Streamed:
    """A reply with server-sent events, each with its name."""

    def __init__(self, telling: EventReply, request: HttpRequest, headers: Headers) -> None:
        self._telling = telling
        self._events = EventStream(request, headers)

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        events = self._written(piece)
        match piece:
            case FinalChunk():
                self._events.finish(events)
            case _:
                await self._events.send(events)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        if self._events.slow:
            return False
        self._events.push(self._written(piece))
        return True

    def response(self) -> web.StreamResponse:
        return self._events.response()

    def failed(self, why: ApiError) -> web.StreamResponse:
        return self._events.failed(why, _line(self._telling.failed(why)))

    def _written(self, piece: OutputChunk | FinalChunk) -> bytes:
        return b"".join(map(_line, self._telling.add(piece)))


def _line(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
