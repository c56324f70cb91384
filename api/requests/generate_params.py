"""Parameters of client requests, independent of protocol, with the model's limits and parsed forms.

Only types are checked here, and the length of lists that would have to be copied.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec

from api.auth.client import Client
from api.images.picture import MediaInput
from api.text.stops import StopRules
from common.errors import InvalidRequest, ServingError
from common.request import RequestSpec
from common.requests.pooling import PoolingParams
from common.requests.sampling import SamplingParams
from common.rpc import MAX_MESSAGE_BYTES

# Limit of one conversation. A template takes 3 us for each message and blocks the event loop.
MAX_MESSAGES = 4096
MAX_SETTINGS_BYTES = 16 << 10  # JSON of a template's own settings
MAX_TOOLS = 1024
MAX_CHOICES = 128  # choices of one HTTP request
MAX_FIELDS = 1 << 15  # fields of a gRPC message. A conversation has three for each message

_TEXT_BYTES_PER_TOKEN = 32  # upper limit. English and code have four to five, an emoji as many
_ROOM_BYTES = 1 << 20  # of a message in addition to its prompts: names, tools, stop strings
_BYTES_PER_TOKEN = 8  # in an HTTP body with many prompts. Ids have up to seven


# A prompt is rejected by its bytes before its tokens are counted. Text that fits the context has at
# most `context_length` times the bytes of the longest token. For vocabularies with very long
# tokens, such as a hundred spaces, the limit is lower, because text of only such tokens is not
# useful. All text counts, even if the tokenizer drops it or encodes it as one token.
@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    context_length: int  # prompt and response together, in tokens
    vocabulary_size: int
    longest_token_bytes: int  # text of one token
    sees_images: bool = False

    @property
    def text_bytes(self) -> int:
        """Return the size limit of one prompt, as UTF-8."""
        return self.context_length * min(self.longest_token_bytes, _TEXT_BYTES_PER_TOKEN)

    @property
    def message_bytes(self) -> int:
        """Return the size limit of a gRPC message, which has one prompt."""
        if self.sees_images:
            return MAX_MESSAGE_BYTES
        return min(_ROOM_BYTES + self.text_bytes, MAX_MESSAGE_BYTES)

    @property
    def body_bytes(self) -> int:
        """Return the size limit of an HTTP body, which has a prompt or a list of them."""
        if self.sees_images:
            return MAX_MESSAGE_BYTES
        prompts = MAX_CHOICES * self.context_length * _BYTES_PER_TOKEN
        return min(_ROOM_BYTES + max(prompts, self.text_bytes), MAX_MESSAGE_BYTES)


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest unless the prompt has known tokens and leaves room for another one."""
    if not token_ids:
        raise InvalidRequest(f"{field} is empty: a prompt has at least one token")
    check_length(token_ids, limits, field)
    check_vocabulary(token_ids, limits, field)


def check_length(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest unless the prompt leaves room for a token. Checks only the length."""
    if len(token_ids) >= limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context of {limits.context_length} tokens "
            f"accepts prompts of at most {limits.context_length - 1}"
        )


def check_context(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest for more tokens than the context. Checks only the length."""
    if len(token_ids) > limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context has {limits.context_length}"
        )


def check_vocabulary(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest naming the first id that is outside the vocabulary."""
    if token_ids and max(token_ids) >= limits.vocabulary_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}]: token {token_ids[index]} is outside the vocabulary "
            f"of {limits.vocabulary_size} tokens"
        )


class TokenizedRequest(msgspec.Struct, frozen=True):
    """A tokenized request, ready for a decode node.

    Attributes:
        stops: None: only tokens end the response.
        echo: text of the prompt, with which the response begins.
        client_sampling: the client's parameters. `spec` also has what hidden states need.
    """

    spec: RequestSpec
    stops: StopRules | None
    client_sampling: SamplingParams
    echo: str | None = None


UNLIMITED = 2**31 - 1  # max_tokens of a request that may fill the context


T = TypeVar("T")


_STARTED_AT_ONCE = 8


async def all_of(work: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> Sequence[T]:
    """Run coroutines concurrently and return their results. The first error ends the others.

    Other tasks run after each few starts: a request may have 128 choices, each of which takes a
    tenth of a millisecond to start.
    """
    if len(work) == 1:
        return [await work[0]()]
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for number, begin in enumerate(work, start=1):
                tasks.append(group.create_task(begin()))
                if number % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class TextPrompt(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "text"  # name in errors

    text: str
    add_special_tokens: bool = True  # the tokenizer adds its special tokens


class TextPairPrompt(msgspec.Struct, frozen=True):
    """Two texts as one prompt, joined as the tokenizer joins pairs."""

    field: ClassVar[str] = "text"

    first: str
    second: str


class PastToolCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier turn."""

    name: str
    arguments: str  # a JSON object, or other text by the model. "": none
    id: str = ""


class ChatTurn(msgspec.Struct, frozen=True):
    role: str
    content: str | None  # None: none, or the content is in `parts`
    name: str | None = None  # name of the speaker, if the template uses it
    reasoning: str | None = None  # reasoning before the content, if the template uses it
    tool_calls: Sequence[PastToolCall] = ()
    tool_call_id: str | None = None  # call to which this is the result
    parts: Sequence[str | MediaInput] = ()  # content in order, if it is not only text


class PromptEnding(Enum):
    """The end of the prompt of a conversation."""

    OPENED = "a new turn of the assistant's"
    CONTINUED = "the last turn, which is continued"
    CLOSED = "the last turn, which has ended"


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation for the model's chat template."""

    field: ClassVar[str] = "messages"

    turns: Sequence[ChatTurn]
    tools: Sequence[Any] = ()  # JSON objects, in OpenAI's form
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)  # variables of the template
    reasoning_effort: str | None = None  # a variable of the template
    ending: PromptEnding = PromptEnding.OPENED

    @property
    def media(self) -> Sequence[MediaInput]:
        return [part for turn in self.turns for part in turn.parts if not isinstance(part, str)]


class TokenIdsPrompt(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "token_ids"

    token_ids: Sequence[int]


class EmbeddingsPrompt(msgspec.Struct, frozen=True):
    field: ClassVar[str] = "input_embeddings"

    values: bytes  # little-endian float32 [num_tokens, hidden size]
    num_tokens: int


class PredictionPrompt(msgspec.Struct, frozen=True):
    """Expected text of a response, for speculative decoding."""

    field: ClassVar[str] = "prediction"

    text: str


class NoPrompt(msgspec.Struct, frozen=True):
    """A missing prompt, which is rejected later with the names of the possible fields."""

    field: ClassVar[str] = "prompt"

    one_of: tuple[str, ...]  # fields that could have had a prompt


Prompt: TypeAlias = (
    TextPrompt
    | TextPairPrompt
    | ChatPrompt
    | TokenIdsPrompt
    | EmbeddingsPrompt
    | PredictionPrompt
    | NoPrompt
)


class RenderedPrompt(msgspec.Struct):
    """The rendered and tokenized prompt, for parsers of its response. Empty until then."""

    num_tokens: int = 0
    end: str = ""  # the last part of a conversation's text


class SharedPrompt(msgspec.Struct):
    """A prompt that several responses may share.

    Attributes:
        job: the request of any of its responses, without its own id and seed. Set by
            RequestGroup.prepare.
    """

    prompt: Prompt
    rendering: RenderedPrompt = msgspec.field(default_factory=RenderedPrompt)
    job: TokenizedRequest | None = None


class RequestGroup(msgspec.Struct):
    """All responses to one request of a client. For one event loop."""

    prompts: Sequence[SharedPrompt]
    num_answers: int
    _turn: asyncio.Lock | None = None  # held by the response that prepares the group
    _ready: bool = False
    _error: ServingError | None = None

    @classmethod
    def of(cls, prompts: Sequence[Prompt], answers_to_each: int = 1) -> Self:
        return cls([SharedPrompt(prompt) for prompt in prompts], len(prompts) * answers_to_each)

    async def prepare(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run the first `work` that completes, for all responses. All other callers wait for it.

        If the caller is cancelled, the next one does the work. Failed work is not tried again, so
        128 choices cost no more than one.

        Raises:
            ServingError: the error of that work.
        """
        if self.num_answers == 1:
            return await work()
        if self._ready:
            return
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if not self._ready:
                try:
                    await work()
                    self._ready = True
                except ServingError as error:
                    self._error = error
                    raise


class GenerateParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one response."""

    prompt: SharedPrompt  # one of the prompts of the request
    together: RequestGroup
    sampling: SamplingParams
    max_tokens_field: str = ""  # name of the client's max_tokens field, "" if unset
    drawn: bool = False  # the seed is random, not given by the client
    stop: Sequence[str] = ()
    stop_regex: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    echo: bool = False  # the response begins with its prompt
    silent: bool = False  # only the prompt is returned: the one generated token is discarded
    request_id: str = ""  # the router's own unique id. "": not made yet
    label: str = ""  # the client's id for it, not unique
    session_id: str = ""  # "": no session
    cache_salt: str | None = None  # None: the cache is shared by all requests without a salt
    priority: int | None = None  # on the client's scale. None: not set
    adapter: str = ""  # name of the adapter. "": the base model
    timeout_s: float | None = None  # None: the router's limit
    shown: frozenset[int] = frozenset()  # special tokens that the text keeps
    prediction: PredictionPrompt | None = None
    whole: bool = False  # the response is not streamed
    stream_interval: int = 0  # tokens of an event. 0: the router's setting


def any_seed() -> int:
    """Return a random seed for a request without one, so that replays sample the same tokens.

    It has 53 bits, which every JSON reader keeps.
    """
    return random.getrandbits(53)


MAX_PROMPTS = 2048
MAX_TOKENS = 1 << 20  # tokens in all prompts of one request

PooledPrompt: TypeAlias = TextPrompt | TextPairPrompt | TokenIdsPrompt


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompts: Sequence[PooledPrompt]
    pooling: PoolingParams
    dimensions: int = 0  # number of leading dimensions to keep. 0: all
    normalize: bool = False


class PoolingCaller(msgspec.Struct, frozen=True):
    """The client of a pooling request, and the request's ids. Other fields: see GenerateParams."""

    client: Client
    request_id: str
    label: str = ""
    traceparent: str = ""
    cache_salt: str | None = None
    timeout_s: float | None = None


class PoolingResult(msgspec.Struct, frozen=True):
    """Vectors and token counts in the order of the prompts."""

    vectors: Sequence[bytes]  # little-endian float32
    num_tokens: Sequence[int]
    cached_tokens: int


def floats(vector: bytes) -> "array[float]":
    """Convert a vector to numbers. Raise ValueError if the bytes are not float32."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found
