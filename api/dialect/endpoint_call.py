"""What one HTTP request asks for, whichever endpoint it came to."""

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
    """What becomes of the choices of one request."""

    def response(self) -> web.StreamResponse:
        """Once all have ended."""
        ...

    def failed(self, why: Refusal) -> web.StreamResponse:
        """Instead, if they will not."""
        ...

    async def write(self, index: int, request_id: str, piece: Piece | LastPiece) -> None:
        """Takes what choice `index` adds. After the last piece of all the answer is complete."""
        ...

    def offer(self, index: int, piece: Piece) -> bool:
        """Takes what choice `index` adds, and is not its last, unless the client is slow; returns
        whether it has."""
        ...


BeginReply: TypeAlias = Callable[[Origin, Request, Headers], Reply]


class Asked(msgspec.Struct, frozen=True):
    model: str | None  # None: whichever is served
    requests: Sequence[Wanted]  # one per choice, in the order of their indices, no ids
    session_id: str  # "": of none
    reply: BeginReply
    lora_path: str | None = None  # an adapter, besides
    form: str = ""  # the field that asks for the form of the answer
    ignored: Sequence[str] = ()  # fields that the answer does not follow


class Dialect(Protocol):
    """What differs between the endpoints."""

    id_prefix: str
    field_names: Fields
    words: Words  # of errors

    def read(self, body: bytes) -> Asked:
        """Raises Refusal."""
        ...
