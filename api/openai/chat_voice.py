"""A response in the format of OpenAI's chats: content, reasoning and tool calls."""

from collections.abc import Callable, Sequence

import msgspec

from api.openai.likelihoods import ChatLogprobs, of_chat
from api.openai.replies import StopReason, stop_reason
from api.parsers.listener import CallPart, ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk


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


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = msgspec.UNSET


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


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = msgspec.UNSET


class ChatResponseWriter:
    """Writer of one choice."""

    def __init__(self, index: int, listener: Callable[[], StreamParser]) -> None:
        """
        Args:
            listener: makes the StreamParser. Called with the first piece, after the prompt is
                rendered.
        """
        self._index = index
        self._make_listener = listener
        self._listener: StreamParser | None = None

    def chunk(self, piece: OutputChunk | FinalChunk) -> ChunkChoice | None:
        first = self._listener is None
        listener = self._listener = self._listener or self._make_listener()
        match piece:
            case FinalChunk():
                heard = listener.hear(piece.text, piece.marks, last=True)
                return ChunkChoice(
                    self._index,
                    _delta(heard, first),
                    _reason(listener, piece),
                    of_chat(piece.tokens),
                    stop_reason(piece),
                )
            case _:
                heard = listener.hear(piece.text, piece.marks, last=False)
                if not heard and not first and not piece.tokens:  # no text is decided yet
                    return None
                return ChunkChoice(self._index, _delta(heard, first), None, of_chat(piece.tokens))

    def choice(self, pieces: Sequence[OutputChunk], last: FinalChunk) -> ChatChoice:
        listener = self._make_listener()
        text, marks = "", list[int]()
        for piece in pieces:
            marks += [len(text) + mark for mark in piece.marks]
            text += piece.text
        heard = listener.hear(text, marks, last=True)
        return ChatChoice(
            self._index,
            _answer(heard),
            _reason(listener, last),
            of_chat([token for piece in pieces for token in piece.tokens]),
            stop_reason(last),
        )


def _delta(heard: ParsedText, first: bool) -> Delta:
    return Delta(
        "assistant" if first else None,
        heard.content or ("" if first and not heard else None),
        heard.reasoning or None,
        [_delta_call(part) for part in heard.calls] or None,
    )


def _delta_call(part: CallPart) -> DeltaCall:
    if not part.id:
        return DeltaCall(part.index, DeltaFunction(arguments=part.arguments))
    return DeltaCall(part.index, DeltaFunction(part.name, part.arguments), part.id, "function")


def _answer(heard: ParsedText) -> ResponseMessage:
    calls = [
        ResponseToolCall(part.id, ResponseFunction(part.name, part.arguments))
        for part in heard.calls
    ]
    return ResponseMessage(
        heard.content if heard.content or not heard else None,
        reasoning_content=heard.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def _reason(listener: StreamParser, last: FinalChunk) -> str:
    """Return the finish reason.

    A truncated response has its own reason, even if it has tool calls.
    """
    stopped = last.finish_reason == "stop"
    return "tool_calls" if stopped and listener.has_called else last.finish_reason
