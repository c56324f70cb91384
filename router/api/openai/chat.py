"""/v1/chat/completions: a conversation, rendered with the model's own template."""

from typing import Annotated

import msgspec

from router.api.openai.asked import Asked
from router.api.openai.bodies import BodyReader
from router.api.openai.fields import Fields, Int32, check_multiplied, choices, samplings
from router.api.openai.harmless import OF_CHATS
from router.api.openai.problems import Refusal
from router.api.openai.strangers import Ignored, Nothing
from router.requests.wanted import Messages, Turn
from router.text.limits import MAX_MESSAGES


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; text is the only kind that there is a use for."""

    type: str
    text: str | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Clients that send back what they were answered say null of some fields."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    id: Ignored = None
    audio: Nothing = None
    function_call: Nothing = None
    reasoning: Nothing = None
    reasoning_content: Nothing = None
    refusal: Nothing = None
    tool_call_id: Nothing = None
    tool_calls: Nothing = None


class ChatFields(Fields, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Int32 | None = None


class Answer(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(msgspec.Struct):
    index: int
    message: Answer
    finish_reason: str
    logprobs: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None = None


class Chat:
    """The dialect of this endpoint."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, ignore_unknown: bool) -> None:
        """
        Args:
            ignore_unknown: as of BodyReader.
        """
        self._reader = BodyReader(ChatFields, OF_CHATS, ignore_unknown=ignore_unknown)
        self.field_names = self._reader.names

    def read(self, body: bytes) -> Asked:
        fields = self._reader.read(body)
        check_multiplied(fields, body)
        max_tokens = fields.max_completion_tokens
        if max_tokens is None:
            max_tokens = fields.max_tokens
        elif fields.max_tokens not in (None, max_tokens):
            raise Refusal(
                400,
                "max_completion_tokens and max_tokens differ; they mean the same",
                param="max_completion_tokens",
            )
        per_prompt = samplings(fields, max_tokens)
        prompt = Messages(
            [_turn(number, message) for number, message in enumerate(fields.messages)]
        )
        wanted = choices(fields, [prompt], per_prompt)
        return Asked.from_fields(fields, wanted, len(per_prompt))

    def choice(self, index: int, text: str, finish_reason: str) -> Choice:
        return Choice(index, Answer(text), finish_reason)

    def chunk(self, index: int, text: str, finish_reason: str | None, first: bool) -> ChunkChoice:
        if first:
            return ChunkChoice(index, Delta("assistant", text), finish_reason)
        return ChunkChoice(index, Delta(content=text or None), finish_reason)


def _turn(number: int, message: Message) -> Turn:
    where = f"messages[{number}]"
    # OpenAI's newer name; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    return Turn(role, _text(f"{where}.content", message.content), message.name)


def _text(where: str, content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise Refusal(400, f"{where} must be text or a list of text parts", param=where)
    texts = []
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            path = f"{where}[{number}]"
            raise Refusal(400, f"{path} is no text; only text is supported", param=path)
        texts.append(part.text)
    return "\n".join(texts)
