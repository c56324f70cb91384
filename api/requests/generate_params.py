"""What a client asks for, whatever protocol it speaks. Nothing of it is checked but its types, and
the length of lists that would have to be copied."""

import random
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Self, TypeAlias

import msgspec

from api.images.picture import Picture
from api.requests.job import Job, Terms
from api.requests.once import Once
from common.requests.images import Image
from common.requests.sampling import SamplingParams

UNLIMITED = 2**31 - 1  # max_tokens of a request for as many tokens as the context leaves


class Text(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "text"  # what errors call it

    text: str
    add_special_tokens: bool = True  # those that the tokenizer begins or ends a text with


class TextPair(msgspec.Struct, frozen=True):
    """Two texts as one prompt, joined as the tokenizer joins pairs."""

    field: ClassVar[str] = "text"

    first: str
    second: str


class ToolCall(msgspec.Struct, frozen=True):
    """Made in an earlier turn."""

    name: str
    arguments: str  # a JSON object, or whatever a model wrote for one; "": none
    id: str = ""


class Turn(msgspec.Struct, frozen=True):
    role: str
    content: str | None  # None: nothing was said, or in parts
    name: str | None = None  # of who speaks, for templates that heed it
    reasoning: str | None = None  # likewise, before it spoke
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None  # of the call that this answers
    parts: Sequence[str | Picture] = ()  # of one with pictures: texts and those, in order


class Ending(Enum):
    """What the prompt that a conversation becomes ends with."""

    OPENED = "a new turn of the assistant's"
    CONTINUED = "the last turn, which goes on"
    CLOSED = "the last turn, which has ended"


class Messages(msgspec.Struct, frozen=True):
    """A conversation, for the model's chat template."""

    field: ClassVar[str] = "messages"

    turns: Sequence[Turn]
    tools: Sequence[Any] = ()  # JSON objects, in OpenAI's form
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)  # the template's own
    reasoning_effort: str | None = None  # likewise
    ending: Ending = Ending.OPENED

    @property
    def pictures(self) -> Sequence[Picture]:
        return [part for turn in self.turns for part in turn.parts if isinstance(part, Picture)]


class TokenIds(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "token_ids"

    token_ids: Sequence[int]


class Prediction(msgspec.Struct, frozen=True):
    """What is expected of an answer."""

    field: ClassVar[str] = "prediction"

    text: str


class Nothing(msgspec.Struct, frozen=True):
    """No prompt at all."""

    field: ClassVar[str] = "prompt"

    one_of: tuple[str, ...]  # fields that could have had one


Prompt: TypeAlias = Text | TextPair | Messages | TokenIds | Prediction | Nothing


class Rendering(msgspec.Struct):
    """What has come of a prompt, for who tells its answer. Empty before it has token ids."""

    num_tokens: int = 0
    end: str = ""  # of a conversation: what the answer follows


class SharedPrompt(msgspec.Struct):
    """A prompt, perhaps of several answers.

    token_ids: made by the first of them.
    images: of the prompt, once there are token ids.
    job: the request of any of its answers, but for what is its own: id and seed.
    """

    prompt: Prompt
    token_ids: Once[Sequence[int]] = msgspec.field(default_factory=Once)
    images: Sequence[Image] = ()
    rendering: Rendering = msgspec.field(default_factory=Rendering)
    job: Once[Job] = msgspec.field(default_factory=Once)


class Together(msgspec.Struct):
    """The answers to one request of a client.

    terms: what they have in common, checked by the first of them.
    counted: among the client's tokens, by the first of them.
    """

    prompts: Sequence[SharedPrompt]
    num_answers: int
    terms: Once[Terms] = msgspec.field(default_factory=Once)
    counted: Once[None] = msgspec.field(default_factory=Once)

    @classmethod
    def of(cls, prompts: Sequence[Prompt], answers_to_each: int = 1) -> Self:
        return cls([SharedPrompt(prompt) for prompt in prompts], len(prompts) * answers_to_each)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    prompt: SharedPrompt  # one of those that came together
    together: Together
    sampling: SamplingParams
    max_tokens_field: str = (
        ""  # the client's name of max_tokens; "": the client left it to a default
    )
    drawn: bool = False  # the seed: its client names none
    stop: Sequence[str] = ()
    stop_regex: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    echo: bool = False  # the answer begins with its prompt
    silent: bool = False  # the prompt is all that is wanted, and one token is asked for in vain
    request_id: str = ""  # this router's own, new for every request; "": to be made
    label: str = ""  # what its client calls it; others may be called so too
    session_id: str = ""  # "": of none
    cache_salt: str | None = None  # None: what is cached is shared with all who give none
    priority: int | None = None  # as its client counts; None: it does not say
    adapter: str = ""  # its name; "": the model as it is
    timeout_s: float | None = None  # None: the router's own limit
    shown: frozenset[int] = frozenset()  # special tokens that are not left out of the text
    prediction: SharedPrompt | None = None  # a Prediction, made into tokens as prompts are


def any_seed() -> int:
    """For a request that names none: whoever continues it must sample alike."""
    return random.getrandbits(64)
