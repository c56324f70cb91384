"""Replies of endpoints that stream named events: the stream, or the whole response at the end.

Independent of the response format of an endpoint.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from api.dialect.endpoint_call import EndpointReply
from api.dialect.events import EventStream, StreamedReply, WholeReply
from api.dialect.problems import ApiError
from api.http.answers import Headers
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
    def events(index: int, piece: OutputChunk) -> bytes:
        return b"".join(map(_line, telling.add(piece)))

    def add(index: int, piece: OutputChunk) -> None:
        for _ in telling.add(piece):
            pass

    if not stream:
        return WholeReply(add, lambda: _encode(telling.last), headers)
    return StreamedReply(
        events,
        lambda: b"",
        1,
        EventStream(request, headers),
        failure=lambda why: _line(telling.failed(why)),
    )


def _line(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
