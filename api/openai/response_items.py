"""The output of /v1/responses as it grows: items, and the events or the body that report them.

An item is a message, a tool call or reasoning. One item at a time is open and grows.
"""

import secrets
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from api.dialect.generation_endpoint import Event, EventContent, RequestOrigin
from api.dialect.problems import ApiError
from api.openai.replies import fingerprint_fields
from api.parsers.events import CallPart, ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk, TokenUsage


class TextPart(msgspec.Struct):
    text: str = ""
    type: str = "output_text"
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningPart(msgspec.Struct):
    text: str = ""
    type: str = "reasoning_text"


class MessageItem(msgspec.Struct):
    id: str
    content: list[TextPart]
    status: str = "in_progress"
    role: str = "assistant"
    type: str = "message"


class ReasoningItem(msgspec.Struct):
    id: str
    content: list[ReasoningPart]
    status: str = "in_progress"
    summary: tuple[()] = ()
    type: str = "reasoning"


class CallItem(msgspec.Struct):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    type: str = "function_call"


Item = MessageItem | ReasoningItem | CallItem


class _Text:
    """A message or reasoning: both have one part, which is text."""

    def __init__(
        self, index: int, item: MessageItem | ReasoningItem, part: TextPart | ReasoningPart
    ) -> None:
        self.kind = item.type
        self._index = index
        self._item = item
        self._part = part
        self._said: list[str] = []
        self._place = {"item_id": item.id, "output_index": index, "content_index": 0}
        self._beside = {"logprobs": ()} if item.type == "message" else {}

    def begun(self) -> Iterator[Event]:
        item = msgspec.structs.replace(self._item, content=[])
        yield _event("output_item.added", output_index=self._index, item=item)
        yield _event("content_part.added", **self._place, part=self._part)

    def more(self, text: str) -> Iterator[Event]:
        self._said.append(text)
        yield _event(f"{self._part.type}.delta", **self._place, delta=text, **self._beside)

    def ended(self, status: str) -> Iterator[Event]:
        self._item.status = status
        text = self._part.text = "".join(self._said)
        yield _event(f"{self._part.type}.done", **self._place, text=text, **self._beside)
        yield _event("content_part.done", **self._place, part=self._part)
        yield _event("output_item.done", output_index=self._index, item=self._item)


class _Call:
    def __init__(self, index: int, item: CallItem) -> None:
        self.kind = item.type
        self._index = index
        self._item = item
        self._said: list[str] = []
        self._place = {"item_id": item.id, "output_index": index}

    def begun(self) -> Iterator[Event]:
        yield _event("output_item.added", output_index=self._index, item=self._item)

    def more(self, text: str) -> Iterator[Event]:
        self._said.append(text)
        yield _event("function_call_arguments.delta", **self._place, delta=text)

    def ended(self, status: str) -> Iterator[Event]:
        item = self._item
        item.status = status
        item.arguments = "".join(self._said)
        yield _event(
            "function_call_arguments.done",
            **self._place,
            name=item.name,
            arguments=item.arguments,
        )
        yield _event("output_item.done", output_index=self._index, item=item)


class ResponseOutput:
    """The output of one response. The caller must exhaust the iterators that methods return.

    An event is valid only when it is yielded, because its item changes later.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: _Text | _Call | None = None

    def add(self, parsed: ParsedText) -> Iterator[Event]:
        if parsed.reasoning:
            if self.kind != "reasoning":
                thought = ReasoningPart()
                reasoning = ReasoningItem(_new_id("rs"), [thought])
                yield from self._begin(reasoning, _Text(len(self.items), reasoning, thought))
            yield from self._more(parsed.reasoning)
        if parsed.content:
            if self.kind != "message":
                part = TextPart()
                message = MessageItem(_new_id("msg"), [part])
                yield from self._begin(message, _Text(len(self.items), message, part))
            yield from self._more(parsed.content)
        for call in parsed.calls:
            yield from self._add_call(call)

    def end(self, *, whole: bool) -> Iterator[Event]:
        """End the output. `whole`: it is complete instead of truncated."""
        yield from self._close("completed" if whole else "incomplete")

    def _add_call(self, part: CallPart) -> Iterator[Event]:
        if part.id:
            item = CallItem(_new_id("fc"), part.id, part.name)
            yield from self._begin(item, _Call(len(self.items), item))
        if part.arguments:
            yield from self._more(part.arguments)

    @property
    def kind(self) -> str:
        """Return the type of the open item, "" if none is open."""
        return "" if self._open is None else self._open.kind

    def _begin(self, item: Item, growing: _Text | _Call) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append(item)
        self._open = growing
        yield from growing.begun()

    def _more(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        yield from self._open.more(text)

    def _close(self, status: str) -> Iterator[Event]:
        growing, self._open = self._open, None
        if growing is not None:
            yield from growing.ended(status)


def _event(kind: str, **fields: Any) -> Event:
    return {"type": f"response.{kind}", **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


_NOTHING_STORED = {
    "background": False,
    "metadata": {},
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


class ResponsesObject(EventContent):
    """One response."""

    def __init__(
        self,
        origin: RequestOrigin,
        echoed: dict[str, Any],
        parser: StreamParser,
        *,
        stream: bool,
    ) -> None:
        super().__init__(stream=stream)
        self._origin = origin
        self._echoed = echoed
        self._parser = parser
        self._output = ResponseOutput()
        self._num_thought = 0  # reasoning tokens
        self._numbers = count()  # sequence numbers of events

    def events(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        return map(self._numbered, self._events(piece))

    def failure(self, why: ApiError) -> Event:
        event = {"type": "error", "code": why.code, "message": str(why), "param": why.param}
        return self._numbered(event)

    def _numbered(self, event: Event) -> Event:
        return {**event, "sequence_number": next(self._numbers)}

    def _events(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        if not self._parser.begun:
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response("in_progress", None)}
        last = isinstance(piece, FinalChunk)
        yield from self._output.add(self._parser.parse(piece.text, piece.marks, last=last))
        if isinstance(piece, FinalChunk):
            whole = piece.finish_reason == "stop"
            yield from self._output.end(whole=whole)
            status = "completed" if whole else "incomplete"
            self.last = self._response(status, piece)
            yield {"type": f"response.{status}", "response": self.last}
        elif self._output.kind == "reasoning":
            self._num_thought += len(piece.token_ids)

    def _response(self, status: str, last: FinalChunk | None) -> Event:
        cut_off = status == "incomplete"
        return {
            "id": self._origin.id,
            "object": "response",
            "created_at": self._origin.created,
            "model": self._origin.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._output.items,
            "usage": None if last is None else self._usage(last.usage),
            **({} if last is None else fingerprint_fields(last)),
            **self._echoed,
            **_NOTHING_STORED,
        }

    def _usage(self, usage: TokenUsage) -> Event:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
