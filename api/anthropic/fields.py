"""Request fields of /v1/messages.

Tool results become turns of their own, as chat templates expect.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from api.dialect.fields import Budget, Int32, ModelName
from api.dialect.guides import JsonSchema, ResponseFormat
from api.dialect.messages import Function, Tool
from api.dialect.problems import Refusal
from api.dialect.unknown_fields import Ignored, Nothing
from api.images.picture import Picture
from api.parsers.model_format import Speech
from api.requests.generate_params import ToolCall, Turn
from api.text.limits import MAX_MESSAGES, MAX_TOOLS

_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


class Text(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"
    cache_control: Ignored = None
    citations: Nothing = None


class Source(msgspec.Struct, forbid_unknown_fields=True):
    """An image source: inline data or a URL."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True):
    """A content block of a message. Its type decides which fields it has."""

    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: Source | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Text] | None = None
    is_error: Ignored = None  # the content describes the error
    signature: Ignored = None
    data: Ignored = None
    cache_control: Ignored = None
    caller: Ignored = None
    citations: Nothing = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Thinking mode. enabled: with a token budget. disabled: reasoning is not returned."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Budget | None = None
    display: Ignored = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: str | None = None


class CountedFields(msgspec.Struct, kw_only=True):
    """Request fields that become part of the prompt. Absent and null mean the same."""

    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    system: str | list[Text] | None = None
    tools: Annotated[list[OfferedTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesFields(CountedFields, kw_only=True):
    """Request fields of /v1/messages: the prompt fields, and fields that control the response."""

    max_tokens: Int32
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older name of output_config.format
    cache_salt: str | None = None


def turns(fields: CountedFields) -> Sequence[Turn]:
    """Convert the messages to turns. Raise Refusal for a block without all fields of its type."""
    made = []
    if fields.system is not None:
        made.append(Turn("system", _text(fields.system)))
    for number, message in enumerate(fields.messages):
        if isinstance(message.content, str):
            made.append(Turn(message.role, message.content))
        elif message.role == "assistant":
            made.append(_said(f"messages[{number}]", message.content))
        else:
            made += _told(message.role, f"messages[{number}]", message.content)
    return made


def tools(fields: CountedFields) -> Sequence[Tool]:
    """Return the tools in OpenAI's form."""
    return [
        Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in fields.tools or ()
    ]


def chosen(fields: CountedFields) -> tuple[str | None, str | None]:
    """Return OpenAI's tool_choice, and the name of the tool that must be called."""
    choice = fields.tool_choice
    return (None, None) if choice is None else (_CHOICES[choice.type], choice.name)


def thinking_budget(fields: CountedFields) -> int:
    """Return the thinking budget as in SamplingParams.

    Raises:
        Refusal: thinking is enabled without a budget, or has one without being enabled.
    """
    thinking = fields.thinking
    if thinking is None or (thinking.type != "enabled" and thinking.budget_tokens is None):
        return -1
    if thinking.type != "enabled" or thinking.budget_tokens is None:
        where = "thinking.budget_tokens"
        raise Refusal(400, f"{where} belongs to thinking that is enabled", param=where)
    return thinking.budget_tokens


def response_format(fields: MessagesFields) -> ResponseFormat | None:
    """Return the response format in OpenAI's form."""
    wanted = (fields.output_config and fields.output_config.format) or fields.output_format
    return None if wanted is None else ResponseFormat("json_schema", JsonSchema(wanted.schema))


def unheeded(fields: MessagesFields, speech: Speech) -> Iterator[str]:
    """Yield the names of fields that this model does not use."""
    if fields.thinking and fields.thinking.type == "enabled" and not speech.takes_budget:
        yield "thinking"
    if fields.output_config and fields.output_config.effort and not speech.takes_effort:
        yield "output_config.effort"


def _said(where: str, blocks: Sequence[Block]) -> Turn:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case Block(type="text", text=str(text)):
                texts.append(text)
            case Block(type="thinking", thinking=str(text)):
                thoughts.append(text)
            case Block(type="redacted_thinking"):
                pass
            case Block(type="tool_use", id=str(call_id), name=str(name)):
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(ToolCall(name, arguments, call_id))
            case _:
                raise _incomplete(f"{where}.content[{number}]", block)
    return Turn(
        "assistant",
        "\n".join(texts) if texts or not calls else None,
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _told(role: str, where: str, blocks: Sequence[Block]) -> Iterator[Turn]:
    parts: list[str | Picture] = []
    for number, block in enumerate(blocks):
        match block:
            case Block(type="text", text=str(text)):
                parts.append(text)
            case Block(type="image", source=Source(type="base64", data=str(data)) as source):
                parts.append(Picture(f"data:{source.media_type or ''};base64,{data}"))
            case Block(type="image", source=Source(type="url", url=str(url))):
                parts.append(Picture(url))
            case Block(type="tool_result", tool_use_id=str(call_id)):
                yield Turn("tool", _text(block.content or ""), tool_call_id=call_id)
            case _:
                raise _incomplete(f"{where}.content[{number}]", block)
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        yield Turn(role, None, parts=tuple(parts))
    elif texts:
        yield Turn(role, "\n".join(texts))


def _text(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _incomplete(where: str, block: Block) -> Refusal:
    return Refusal(400, f"{where} is no {block.type} block that can stand here", param=where)
