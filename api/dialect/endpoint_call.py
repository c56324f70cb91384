"""One generation request over HTTP, independent of its endpoint."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
from aiohttp import web

from api.dialect.origin import RequestOrigin
from api.dialect.problems import ApiError, Fields, Words
from api.http.answers import Headers
from api.http.request import HttpRequest
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import GenerateParams


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
