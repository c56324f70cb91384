"""Replies to a request: one whole body, or server-sent events, and their handling of errors."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeAlias

import msgspec
from aiohttp import web

from api.dialect.problems import ApiError, Fields, Words
from api.http.messages import EVENT_STREAM, Headers, HttpRequest, HttpStream, whole
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import GenerateParams

DONE = b"data: [DONE]\n\n"


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


def _error_event(why: ApiError) -> bytes:
    """Return the error body as an event, without [DONE]: no client takes the response for
    complete.
    """
    return b"data: " + why.body + b"\n\n"


class StreamedReply:
    """An EndpointReply with server-sent events."""

    def __init__(
        self,
        event: Callable[[int, OutputChunk], bytes],
        end: Callable[[], bytes],
        num_choices: int,
        request: HttpRequest,
        headers: Headers,
        failure: Callable[[ApiError], bytes] = _error_event,
    ) -> None:
        """
        Args:
            event: returns the events of each piece, given the index of its choice. Each is
                complete, with the empty line that ends it.
            end: returns the events after all choices have ended.
            failure: returns the event that ends the stream after an error.
        """
        self._event = event
        self._end = end
        self._num_left = num_choices
        self._headers = headers
        self._stream = HttpStream(
            request,
            EVENT_STREAM,
            (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers),
        )
        self._failure = failure

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        event = self._event(index, piece)
        self._num_left -= isinstance(piece, FinalChunk)
        if not self._num_left:
            self._stream.finish(event + self._end())
        elif event:
            await self._stream.send(event)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        if self._stream.slow:
            return False
        if event := self._event(index, piece):
            self._stream.push(event)
        return True

    def response(self) -> web.StreamResponse:
        return self._stream

    def failed(self, why: ApiError) -> web.StreamResponse:
        if self._stream.finished:  # only a slow client kept the one choice waiting
            return self._stream
        if not self._stream.prepared:
            return why.response(self._headers)
        self._stream.finish(self._failure(why))
        return self._stream


class RequestOrigin(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds since 1970

    @classmethod
    def now(cls, answer_id: str, model: str) -> Self:
        return cls(answer_id, model, int(time.time()))


class EndpointReply(Protocol):
    """Writer of the response to one request, with all of its choices."""

    def response(self) -> web.StreamResponse:
        """Return the HTTP response, after all choices have ended."""
        ...

    def failed(self, why: ApiError) -> web.StreamResponse:
        """Return the HTTP response after an error."""
        ...

    async def write(self, index: int, request_id: str, piece: OutputChunk | FinalChunk) -> None:
        """Write output of choice `index`.

        After the last piece of every choice the response is complete.
        """
        ...

    def offer(self, index: int, piece: OutputChunk) -> bool:
        """Write output of choice `index` that is not its last, unless the client is slow.

        Returns whether the piece was written.
        """
        ...


BeginReply: TypeAlias = Callable[[RequestOrigin, HttpRequest, Headers], EndpointReply]


class EndpointCall(msgspec.Struct, frozen=True):
    model: str | None  # None: the served model
    requests: Sequence[GenerateParams]  # one per choice, in the order of their indices, without ids
    session_id: str  # "": no session
    reply: BeginReply
    lora_path: str | None = None  # an adapter in addition to `model`
    form: str = ""  # the field that asks for a response format
    ignored: Sequence[str] = ()  # fields that do not affect the response


class ApiDialect(Protocol):
    """The differences between the endpoints."""

    id_prefix: str
    field_names: Fields
    words: Words  # error vocabulary

    def read(self, body: bytes) -> EndpointCall:
        """Parse a body. Raise ApiError if it is invalid."""
        ...


Event = dict[str, Any]  # has a "type", which determines its other fields
_encode = msgspec.json.Encoder().encode


# Replies of endpoints that stream named events: the stream, or the whole response at the end.
#
# Independent of the response format of an endpoint.
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
    reply: EventReply, stream: bool, request: HttpRequest, headers: Headers
) -> EndpointReply:
    def events(index: int, piece: OutputChunk) -> bytes:
        return b"".join(map(_line, reply.add(piece)))

    def add(index: int, piece: OutputChunk) -> None:
        for _ in reply.add(piece):
            pass

    if not stream:
        return WholeReply(add, lambda: _encode(reply.last), headers)
    return StreamedReply(
        events,
        lambda: b"",
        1,
        request,
        headers,
        failure=lambda why: _line(reply.failed(why)),
    )


def _line(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
