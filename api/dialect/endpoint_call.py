"""One generation request over HTTP, independent of its endpoint."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
from aiohttp import web

from api.dialect.origin import Origin
from api.dialect.problems import Fields, Refusal, Words
from api.http.answers import Headers
from api.http.request import Request
from api.requests.answer import LastPiece, Piece
from api.requests.generate_params import Wanted


class Reply(Protocol):
    """Writer of the response to one request, with all of its choices."""

    def response(self) -> web.StreamResponse:
        """Return the HTTP response, after all choices have ended."""
        ...

    def failed(self, why: Refusal) -> web.StreamResponse:
        """Return the HTTP response after an error."""
        ...

    async def write(self, index: int, request_id: str, piece: Piece | LastPiece) -> None:
        """Write output of choice `index`.

        After the last piece of every choice the response is complete.
        """
        ...

    def offer(self, index: int, piece: Piece) -> bool:
        """Write output of choice `index` that is not its last, unless the client is slow.

        Returns whether the piece was written.
        """
        ...


BeginReply: TypeAlias = Callable[[Origin, Request, Headers], Reply]


class Asked(msgspec.Struct, frozen=True):
    model: str | None  # None: the served model
    requests: Sequence[Wanted]  # one per choice, in the order of their indices, without ids
    session_id: str  # "": no session
    reply: BeginReply
    lora_path: str | None = None  # an adapter in addition to `model`
    form: str = ""  # the field that asks for a response format
    ignored: Sequence[str] = ()  # fields that do not affect the response


class Dialect(Protocol):
    """The differences between the endpoints."""

    id_prefix: str
    field_names: Fields
    words: Words  # error vocabulary

    def read(self, body: bytes) -> Asked:
        """Parse a body. Raise Refusal if it is invalid."""
        ...
