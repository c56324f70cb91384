"""/v1/responses: the fields of OpenAI's newer chat API, without its stored conversations."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from api.dialect.bodies import Ignored, Nothing
from api.dialect.fields import (
    Budget,
    GenerationFields,
    Int32,
    JsonSchema,
    ModelName,
    ResponseFormat,
    check_multiplied,
    samplings,
    session_of,
)
from api.dialect.generation_endpoint import Dialect, EndpointCall
from api.dialect.ignored_fields import OF_RESPONSES
from api.dialect.messages import ToolDefinition, ToolFunction
from api.dialect.problems import invalid
from api.dialect.tools import chat_call, offered
from api.images.picture import ImageInput
from api.openai.response_items import ResponsesObject
from api.parsers.model_format import ModelFormat
from api.requests.generate_params import MAX_MESSAGES, MAX_TOOLS, ChatPrompt, ChatTurn, PastToolCall


class ResponseInputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message, an output or reasoning: text, or an image in a message."""

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: Nothing = None
    annotations: Ignored = None
    logprobs: Ignored = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the input. Output items of an earlier response can be sent back unchanged."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | list[ResponseInputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponseInputPart] | None = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseNamedTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"] = "function"


class ResponseReasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponseTextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None  # schemas are always strict


class TextFields(msgspec.Struct, forbid_unknown_fields=True):
    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Ignored = None
    include_usage: Ignored = None  # the last event has it anyway


class ResponseFields(msgspec.Struct, kw_only=True):
    """Request fields. Absent and null mean the same."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    model: ModelName | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    thinking_token_budget: Budget | None = None
    text: TextFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None


def _call(
    fields: ResponseFields, num_bytes: int, model_format: ModelFormat, ignored: list[str]
) -> EndpointCall:
    effort = fields.reasoning.effort if fields.reasoning else None
    if effort and not model_format.takes_effort:
        effort = None
        ignored.append("reasoning.effort")
    if fields.text and fields.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    common = GenerationFields(
        response_format=_format(fields.text),
        **{name: getattr(fields, name) for name in _SAME_NAMES},
    )
    check_multiplied(common, num_bytes)
    offer = offered(
        [_tool(each) for each in fields.tools or ()],
        fields.tool_choice,
        model_format,
        parallel=fields.parallel_tool_calls,
    )
    max_tokens = fields.max_output_tokens
    call = chat_call(
        common,
        ChatPrompt(turns(fields), offer.shown, fields.chat_template_kwargs or {}, effort),
        samplings(common, max_tokens, thinking_budget=fields.thinking_token_budget),
        offer,
        model_format,
        form_field="text.format" if common.response_format else "",
        max_tokens_field="" if max_tokens is None else "max_output_tokens",
    )
    stream = bool(fields.stream)
    return EndpointCall(
        fields.model,
        call.requests,
        lambda origin: ResponsesObject(origin, _echoed(fields), call.parser(), stream=stream),
        stream,
        session_of(common),
        form=call.form,
    )


_SAME_NAMES = {*ResponseFields.__struct_fields__} & {*GenerationFields.__struct_fields__} - {
    "stream_options"  # of another form
}
RESPONSES = Dialect(
    "resp_",
    ResponseFields,
    OF_RESPONSES,
    _call,
    other_names={
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
    },
)


def turns(fields: ResponseFields) -> Sequence[ChatTurn]:
    """Return the turns of the conversation. Adjacent assistant items form one turn.

    Raises:
        ApiError: an item is incomplete, or has content that is neither text nor an allowed image.
    """
    made = [] if fields.instructions is None else [ChatTurn("system", fields.instructions)]
    if isinstance(fields.input, str):
        return [*made, ChatTurn("user", fields.input)]
    going_on = False  # the last turn is the assistant's
    for number, item in enumerate(fields.input):
        turn = _turn(f"input[{number}]", item)
        its_own = turn.role == "assistant"
        if its_own and going_on and (joined := _joined(made[-1], turn)):
            made[-1] = joined
        else:
            made.append(turn)
        going_on = its_own
    return made


def _turn(where: str, item: InputItem) -> ChatTurn:
    match item:
        case InputItem(type="function_call", name=str(name), call_id=str(call_id)):
            call = PastToolCall(name, item.arguments or "", call_id)
            return ChatTurn("assistant", None, tool_calls=(call,))
        case InputItem(type="function_call_output", output=output, call_id=str(call_id)):
            return ChatTurn("tool", _text(f"{where}.output", output), tool_call_id=call_id)
        case InputItem(type="reasoning"):
            return ChatTurn(
                "assistant", None, reasoning=_text(f"{where}.content", item.content or "")
            )
        case InputItem(type="message", role=str(role), content=content):
            role = "system" if role == "developer" else role
            if role != "assistant" and isinstance(content, list) and any(map(_shows, content)):
                parts = (_part(f"{where}.content", *each) for each in enumerate(content))
                return ChatTurn(role, None, parts=tuple(parts))
            return ChatTurn(role, _text(f"{where}.content", content))
        case _:
            raise invalid(where, f"lacks a required field of {item.type}")


def _joined(before: ChatTurn, after: ChatTurn) -> ChatTurn | None:
    """Return two assistant turns as one, or None if that would change the order of their parts."""
    if after.reasoning is not None and (before.content is not None or before.tool_calls):
        return None
    if after.content is not None and (before.content is not None or before.tool_calls):
        return None
    return ChatTurn(
        "assistant",
        after.content if before.content is None else before.content,
        reasoning=after.reasoning if before.reasoning is None else before.reasoning,
        tool_calls=(*before.tool_calls, *after.tool_calls),
    )


def _shows(part: ResponseInputPart) -> bool:
    return part.type == "input_image"


def _part(where: str, number: int, part: ResponseInputPart) -> str | ImageInput:
    if not _shows(part):
        return _text_of(where, number, part)
    if part.image_url is None:
        raise invalid(f"{where}[{number}].image_url", "is missing: file_id is not supported")
    return ImageInput(part.image_url, part.detail == "low")


def _text(where: str, content: str | list[ResponseInputPart] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(where, "must be text or a list of text parts")
    return "\n".join(_text_of(where, number, part) for number, part in enumerate(content))


def _text_of(where: str, number: int, part: ResponseInputPart) -> str:
    if not part.type.endswith("text") or part.text is None:
        raise invalid(f"{where}[{number}]", "is not text: only text is supported")
    return part.text


def _format(text: TextFields | None) -> ResponseFormat | None:
    """Return the response format in the form of chat completions."""
    if text is None or text.format is None:
        return None
    schema = text.format.schema
    return ResponseFormat(text.format.type, None if schema is None else JsonSchema(schema))


def _tool(tool: ResponseTool) -> ToolDefinition:
    return ToolDefinition(
        "function", ToolFunction(tool.name, tool.description, tool.parameters, tool.strict)
    )


def _echoed(fields: ResponseFields) -> dict[str, Any]:
    """Return the request fields that a response repeats."""
    effort = fields.reasoning.effort if fields.reasoning else None
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "reasoning": {"effort": effort, "summary": None},
        "text": fields.text or {"format": {"type": "text"}},
        "user": fields.user,
    }
