"""What a client asks for, whatever protocol it speaks. Nothing of it is checked but its types, and
the length of lists that would have to be copied."""

import asyncio
import random
from collections.abc import Sequence
from typing import ClassVar, Self, TypeAlias

import msgspec

from common.requests.sampling import SamplingParams, unchecked
from protos.router_pb2 import GenerateRequest, TokenizeRequest

UNLIMITED = 2**31 - 1  # max_tokens of a request for as many tokens as the context leaves


class Text(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "text"  # what errors call it

    text: str


class Turn(msgspec.Struct, frozen=True):
    role: str
    content: str
    name: str | None = None  # of who speaks, for templates that heed it


class Messages(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "messages"

    turns: Sequence[Turn]


class TokenIds(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "token_ids"

    token_ids: Sequence[int]


class Nothing(msgspec.Struct, frozen=True):
    """No prompt at all."""

    field: ClassVar[str] = "prompt"

    one_of: tuple[str, ...]  # fields that could have had one


Prompt: TypeAlias = Text | Messages | TokenIds | Nothing


class SharedPrompt(msgspec.Struct):
    """A prompt, perhaps of several answers, made into tokens by whichever comes to it first."""

    prompt: Prompt
    token_ids: Sequence[int] | None = None  # None: not yet
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class Together(msgspec.Struct):
    """What came as one request, whose prompts are counted as one by whichever of its answers comes
    to it first."""

    prompts: Sequence[SharedPrompt]
    num_answers: int
    counted: bool = False
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, prompts: Sequence[Prompt], answers_to_each: int = 1) -> Self:
        return cls([SharedPrompt(prompt) for prompt in prompts], len(prompts) * answers_to_each)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    prompt: SharedPrompt  # one of those that came together
    together: Together
    sampling: SamplingParams
    stop: Sequence[str] = ()
    request_id: str = ""  # this router's own, new for every request; "": to be made
    label: str = ""  # what its client calls it; others may be called so too
    session_id: str = ""  # "": of none
    cache_salt: str | None = None  # None: what is cached is shared with all who give none
    timeout_s: float | None = None  # None: the router's own limit


def any_seed() -> int:
    """For a request that names none: whoever continues it must sample alike."""
    return random.getrandbits(64)


def from_request(request: GenerateRequest) -> Wanted:
    """What is asked for over gRPC."""
    together = Together.of([from_prompt(request)])
    return Wanted(
        prompt=together.prompts[0],
        together=together,
        sampling=unchecked(request.sampling, max_tokens=UNLIMITED, seed=any_seed()),
        stop=tuple(request.sampling.stop),
        label=request.request_id,
        session_id=request.session_id,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
    )


def from_prompt(request: GenerateRequest | TokenizeRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return Text(request.text)
        case "messages":
            turns = [Turn(turn.role, turn.content) for turn in request.messages.messages]
            return Messages(turns)
        case "token_ids" if isinstance(request, GenerateRequest):
            return TokenIds(request.token_ids.ids)
        case _:
            fields = request.DESCRIPTOR.oneofs_by_name["prompt"].fields
            return Nothing(tuple(field.name for field in fields))
