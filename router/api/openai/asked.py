"""What one HTTP request asks for, whichever endpoint it came to."""

from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from router.api.openai.fields import Fields
from router.requests.wanted import Wanted


class Asked(msgspec.Struct, frozen=True):
    model: str | None  # None: whichever is served
    requests: Sequence[Wanted]  # one per choice, in the order of their indices, no ids
    num_per_prompt: int  # choices of each prompt, which stand together
    stream: bool
    include_usage: bool
    session_id: str  # "": of none

    @classmethod
    def from_fields(cls, fields: Fields, requests: Sequence[Wanted], num_per_prompt: int) -> Self:
        options = fields.stream_options
        return cls(
            model=fields.model,
            requests=requests,
            num_per_prompt=num_per_prompt,
            stream=bool(fields.stream),
            include_usage=options is not None and bool(options.include_usage),
            session_id=fields.user or "",
        )


class Dialect(Protocol):
    """What differs between the endpoints."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    field_names: frozenset[str]

    def read(self, body: bytes) -> Asked:
        """Raises Refusal."""
        ...

    def choice(self, index: int, text: str, finish_reason: str) -> msgspec.Struct:
        """One choice of a whole answer."""
        ...

    def chunk(
        self, index: int, text: str, finish_reason: str | None, first: bool
    ) -> msgspec.Struct:
        """The part of one choice that one chunk of a streamed answer adds."""
        ...
