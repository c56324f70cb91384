"""Request fields of /v1/messages, and their conversion to chat turns, tools and formats.

Tool results become separate turns, as chat templates expect.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from api.dialect.bodies import Ignored, Nothing
from api.dialect.fields import Budget, Int32, JsonSchema, ModelName, ResponseFormat
from api.dialect.messages import ToolDefinition, ToolFunction
from api.dialect.problems import ApiError, invalid
from api.images.picture import ImageInput
from api.parsers.model_format import ModelFormat
from api.requests.generate_params import MAX_MESSAGES, MAX_TOOLS, ChatTurn, PastToolCall

_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


class AnthropicText(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"
    cache_control: Ignored = None
    citations: Nothing = None


class AnthropicSource(msgspec.Struct, forbid_unknown_fields=True):
    """An image source: inline data or a URL."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None


class AnthropicBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A content block of a message. Its type decides which fields it has."""

    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: AnthropicSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[AnthropicText] | None = None
    is_error: Ignored = None  # the content describes the error
    signature: Ignored = None
    data: Ignored = None
    cache_control: Ignored = None
    caller: Ignored = None
    citations: Nothing = None


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(msgspec.Struct, forbid_unknown_fields=True):
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


class CountTokensFields(msgspec.Struct, kw_only=True):
    """Request fields that become part of the prompt. Absent and null mean the same."""

    messages: Annotated[list[AnthropicMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    system: str | list[AnthropicText] | None = None
    tools: Annotated[list[AnthropicTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None


class MessagesFields(CountTokensFields, kw_only=True):
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


def turns(fields: CountTokensFields) -> Sequence[ChatTurn]:
    """Convert the messages to turns. Raise ApiError for a block that lacks fields of its type."""
    made = []
    if fields.system is not None:
        made.append(ChatTurn("system", _text(fields.system)))
    for number, message in enumerate(fields.messages):
        if isinstance(message.content, str):
            made.append(ChatTurn(message.role, message.content))
        elif message.role == "assistant":
            made.append(_said(f"messages[{number}]", message.content))
        else:
            made += _input_turns(message.role, f"messages[{number}]", message.content)
    return made


def tools(fields: CountTokensFields) -> Sequence[ToolDefinition]:
    """Return the tools in OpenAI's form."""
    return [
        ToolDefinition(
            "function", ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict)
        )
        for tool in fields.tools or ()
    ]


def chosen(fields: CountTokensFields) -> str | AnthropicToolChoice | None:
    """Return OpenAI's tool_choice, or the choice that names a tool."""
    choice = fields.tool_choice
    return choice if choice is None or choice.name is not None else _CHOICES[choice.type]


def thinking_budget(fields: CountTokensFields) -> int | None:
    """Return the thinking budget, None without one.

    Raises:
        ApiError: thinking is enabled without a budget, or has one without being enabled.
    """
    thinking = fields.thinking
    if thinking is None or (thinking.type != "enabled" and thinking.budget_tokens is None):
        return None
    if thinking.type != "enabled" or thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "requires thinking.type enabled")
    return thinking.budget_tokens


def response_format(fields: MessagesFields) -> ResponseFormat | None:
    """Return the response format in OpenAI's form."""
    output_format = (fields.output_config and fields.output_config.format) or fields.output_format
    return (
        None
        if output_format is None
        else ResponseFormat("json_schema", JsonSchema(output_format.schema))
    )


def unused(fields: MessagesFields, model_format: ModelFormat) -> Iterator[str]:
    """Yield the names of fields that this model does not use."""
    if fields.thinking and fields.thinking.type == "enabled" and not model_format.takes_budget:
        yield "thinking"
    if fields.output_config and fields.output_config.effort and not model_format.takes_effort:
        yield "output_config.effort"


def _said(where: str, blocks: Sequence[AnthropicBlock]) -> ChatTurn:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case AnthropicBlock(type="text", text=str(text)):
                texts.append(text)
            case AnthropicBlock(type="thinking", thinking=str(text)):
                thoughts.append(text)
            case AnthropicBlock(type="redacted_thinking"):
                pass
            case AnthropicBlock(type="tool_use", id=str(call_id), name=str(name)):
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(PastToolCall(name, arguments, call_id))
            case _:
                raise _incomplete(f"{where}.content[{number}]", block)
    return ChatTurn(
        "assistant",
        "\n".join(texts) if texts or not calls else None,
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _input_turns(role: str, where: str, blocks: Sequence[AnthropicBlock]) -> Iterator[ChatTurn]:
    parts: list[str | ImageInput] = []
    for number, block in enumerate(blocks):
        match block:
            case AnthropicBlock(type="text", text=str(text)):
                parts.append(text)
            case AnthropicBlock(
                type="image", source=AnthropicSource(type="base64", data=str(data)) as source
            ):
                parts.append(ImageInput(f"data:{source.media_type or ''};base64,{data}"))
            case AnthropicBlock(type="image", source=AnthropicSource(type="url", url=str(url))):
                parts.append(ImageInput(url))
            case AnthropicBlock(type="tool_result", tool_use_id=str(call_id)):
                yield ChatTurn("tool", _text(block.content or ""), tool_call_id=call_id)
            case _:
                raise _incomplete(f"{where}.content[{number}]", block)
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        yield ChatTurn(role, None, parts=tuple(parts))
    elif texts:
        yield ChatTurn(role, "\n".join(texts))


def _text(content: str | Sequence[AnthropicText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _incomplete(where: str, block: AnthropicBlock) -> ApiError:
    return invalid(where, f"is not a valid {block.type} block here")
