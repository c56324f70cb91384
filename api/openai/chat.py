"""/v1/chat/completions: a conversation in the model's chat template, and its response."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from api.dialect.fields import (
    Budget,
    GenerationFields,
    Int32,
    check_multiplied,
    form_field,
    includes_usage,
    samplings,
    session_of,
)
from api.dialect.generation_endpoint import Dialect, EndpointCall
from api.dialect.ignored_fields import OF_CHATS
from api.dialect.messages import (
    ContentPart,
    MessageList,
    NamedToolChoice,
    ToolList,
    conversation,
    text_of,
)
from api.dialect.problems import invalid
from api.dialect.tools import chat_call, offered
from api.openai.replies import (
    ChatLogprobs,
    ChoiceCollector,
    ChoiceEnd,
    ReturnedStates,
    generated_ids,
    of_chat,
)
from api.parsers.model_format import ModelFormat
from api.parsers.source import CallPart, ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import PredictionPrompt
from common.requests.sampling import MAX_LOGPROBS


class ResponseFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON, as the model wrote it


class ResponseToolCall(msgspec.Struct):
    id: str
    function: ResponseFunction
    type: str = "function"


class ResponseMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ResponseToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(ChoiceEnd):
    index: int
    message: ResponseMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class DeltaFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class DeltaCall(msgspec.Struct, omit_defaults=True):
    """Part of the call with this index: first its id and name, then more of its arguments."""

    index: int
    function: DeltaFunction
    id: str | None = None
    type: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChunkChoice(ChoiceEnd):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class ChatResponseWriter:
    """Writes one choice of a chat completion.

    Args:
        returns_ids: token ids are returned.
    """

    def __init__(self, index: int, parser: StreamParser, *, returns_ids: bool = False) -> None:
        self._index = index
        self._parser = parser
        self._returns_ids = returns_ids
        self._states = ReturnedStates()

    def chunk(self, piece: OutputChunk | FinalChunk) -> ChunkChoice | None:
        first, last = not self._parser.begun, isinstance(piece, FinalChunk)
        parsed = self._parser.parse(piece.text, piece.marks, last=last)
        returned = piece.tokens or self._returns_ids
        self._states.add(piece)
        if not (parsed or first or last or returned):  # no text can be sent yet
            return None
        chunk = ChunkChoice(self._index, _delta(parsed, first), None, of_chat(piece.tokens))
        if isinstance(piece, FinalChunk):
            chunk.finish_reason = _reason(self._parser, piece)
            self._states.end(chunk, piece)
        if self._returns_ids:
            chunk.token_ids = generated_ids([piece])
        return chunk

    def choice(self, pieces: Sequence[OutputChunk], last: FinalChunk) -> ChatChoice:
        text, marks = "", list[int]()
        for piece in pieces:
            marks += [len(text) + mark for mark in piece.marks]
            text += piece.text
            self._states.add(piece)
        parsed = self._parser.parse(text, marks, last=True)
        logprobs = of_chat([token for piece in pieces for token in piece.tokens])
        reason = _reason(self._parser, last)
        choice = ChatChoice(self._index, _answer(parsed), reason, logprobs)
        self._states.end(choice, last)
        if self._returns_ids:
            choice.token_ids = generated_ids(pieces)
        return choice


def _delta(parsed: ParsedText, first: bool) -> Delta:
    return Delta(
        "assistant" if first else None,
        parsed.content or ("" if first and not parsed else None),
        parsed.reasoning or None,
        [_delta_call(part) for part in parsed.calls] or None,
    )


def _delta_call(part: CallPart) -> DeltaCall:
    if not part.id:
        return DeltaCall(part.index, DeltaFunction(arguments=part.arguments))
    return DeltaCall(part.index, DeltaFunction(part.name, part.arguments), part.id, "function")


def _answer(parsed: ParsedText) -> ResponseMessage:
    calls = [
        ResponseToolCall(part.id, ResponseFunction(part.name, part.arguments))
        for part in parsed.calls
    ]
    return ResponseMessage(
        parsed.content if parsed.content or not parsed else None,
        reasoning_content=parsed.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def _reason(parser: StreamParser, last: FinalChunk) -> str:
    """Return the finish reason.

    A truncated response is reported as truncated even if it has tool calls.
    """
    stopped = last.finish_reason == "stop"
    return "tool_calls" if stopped and parser.has_called else last.finish_reason


class PredictionFields(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[ContentPart]


class ChatFields(GenerationFields, kw_only=True):
    messages: MessageList
    tools: ToolList | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None  # the same, by the name in Qwen's API
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: PredictionFields | None = None


def _call(
    fields: ChatFields, num_bytes: int, model_format: ModelFormat, ignored: list[str]
) -> EndpointCall:
    if fields.reasoning_effort and not model_format.takes_effort:
        fields.reasoning_effort = None
        ignored.append("reasoning_effort")
    check_multiplied(fields, num_bytes)
    offer = offered(
        fields.tools or (),
        fields.tool_choice,
        model_format,
        parallel=fields.parallel_tool_calls,
    )
    max_tokens, max_tokens_field = _one_of(fields, "max_completion_tokens", "max_tokens")
    budget, _ = _one_of(fields, "thinking_token_budget", "thinking_budget")
    call = chat_call(
        fields,
        conversation(fields, fields.messages, offer.shown),
        samplings(fields, max_tokens, logprobs=_logprobs(fields), thinking_budget=budget),
        offer,
        model_format,
        form_field=form_field(fields),
        max_tokens_field=max_tokens_field,
        prediction=_prediction(fields.prediction),
        reasons=fields.include_reasoning is not False,
    )
    returns_ids = bool(fields.return_token_ids)
    num = len(call.requests)
    collector = ChoiceCollector(
        whole_object="chat.completion",
        chunk_object="chat.completion.chunk",
        num=num,
        num_per_prompt=num,
        stream=bool(fields.stream),
        include_usage=includes_usage(fields),
        writer=lambda index: ChatResponseWriter(index, call.parser(), returns_ids=returns_ids),
        returns_prompt_ids=returns_ids,
    )
    return EndpointCall(
        fields.model,
        call.requests,
        collector.content,
        collector.stream,
        session_of(fields),
        fields.lora_path,
        call.form,
    )


CHAT = Dialect("chatcmpl-", ChatFields, OF_CHATS, _call)


def _prediction(fields: PredictionFields | None) -> PredictionPrompt | None:
    text = "" if fields is None else text_of("prediction.content", fields.content)
    return PredictionPrompt(text) if text else None


def _logprobs(fields: ChatFields) -> int:
    """Return the number of log-probabilities as in SamplingParams."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs", "requires logprobs: set both")
    return -1


def _one_of(fields: ChatFields, name: str, other: str) -> tuple[int | None, str]:
    """Return the value of two fields with the same meaning, and the name of the field that is set.

    None and "" if neither is set.
    """
    value, second = getattr(fields, name), getattr(fields, other)
    if value is None:
        return second, "" if second is None else other
    if second not in (None, value):
        raise invalid(name, f"and {other} differ; they mean the same")
    return value, name
