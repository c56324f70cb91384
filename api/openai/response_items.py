"""The output of /v1/responses as it grows: items, and the events or the body that report them.

An item is a message, a tool call or reasoning. One item at a time is open and grows.
"""

import secrets
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from api.dialect.generation_endpoint import Event, EventContent, RequestOrigin
from api.dialect.problems import ApiError
from api.openai.replies import fingerprint_fields
from api.parsers.source import ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk, TokenUsage


class _ItemKind(NamedTuple):
    """A kind of item with text in one content part.

    Attributes:
        fields: fields of the item that do not change.
        part: the part, without its text. Its type is in the names of events.
        beside: further fields of events with text.
    """

    id_prefix: str
    fields: Mapping[str, Any]
    part: Mapping[str, Any]
    beside: Mapping[str, Any]


_KINDS: Mapping[str, _ItemKind] = {
    "message": _ItemKind(
        "msg",
        {"role": "assistant"},
        {"type": "output_text", "annotations": (), "logprobs": ()},
        {"logprobs": ()},
    ),
    "reasoning": _ItemKind("rs", {"summary": ()}, {"type": "reasoning_text"}, {}),
}
_CALL, _ARGUMENTS = "function_call", "function_call_arguments"


class ResponseOutput:
    """The output of one response. The caller must exhaust the iterators that methods return.

    An event is valid only when it is yielded, because its item changes later.

    Attributes:
        kind: type of the open item, "" if none is open.
    """

    def __init__(self) -> None:
        self.items: list[Event] = []
        self.kind = ""
        self._texts: list[str] = []  # of the open item
        self._place: Mapping[str, Any] = {}  # of the open item, in its events

    def add(self, parsed: ParsedText) -> Iterator[Event]:
        for kind, text in (("reasoning", parsed.reasoning), ("message", parsed.content)):
            if text:
                if self.kind != kind:
                    yield from self._begin_text(kind)
                yield self._delta(_KINDS[kind].part["type"], text, **_KINDS[kind].beside)
        for call in parsed.calls:
            if call.id:
                yield from self._begin(_CALL, "fc", call_id=call.id, name=call.name, arguments="")
            if call.arguments:
                yield self._delta(_ARGUMENTS, call.arguments)

    def end(self, *, whole: bool) -> Iterator[Event]:
        """End the output. `whole`: it is complete instead of truncated."""
        yield from self._close("completed" if whole else "incomplete")

    def _begin_text(self, kind: str) -> Iterator[Event]:
        prefix, fields, part, _ = _KINDS[kind]
        yield from self._begin(kind, prefix, content=(), **fields)
        self._place = {**self._place, "content_index": 0}
        yield _event("content_part.added", **self._place, part={**part, "text": ""})

    def _begin(self, kind: str, id_prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": _new_id(id_prefix), **fields, "status": "in_progress", "type": kind}
        self._place = {"item_id": item["id"], "output_index": len(self.items)}
        self.items.append(item)
        self.kind = kind
        yield _event("output_item.added", output_index=len(self.items) - 1, item=item)

    def _delta(self, name: str, text: str, **beside: Any) -> Event:
        self._texts.append(text)
        return _event(f"{name}.delta", **self._place, delta=text, **beside)

    def _close(self, status: str) -> Iterator[Event]:
        if not self.kind:
            return
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if self.kind == _CALL:
            item["arguments"] = text
            name = item["name"]
            yield _event(f"{_ARGUMENTS}.done", **self._place, name=name, arguments=text)
        else:
            kind = _KINDS[self.kind]
            part = {**kind.part, "text": text}
            item["content"] = (part,)
            yield _event(f"{part['type']}.done", **self._place, text=text, **kind.beside)
            yield _event("content_part.done", **self._place, part=part)
        self.kind = ""
        self._texts.clear()
        yield _event("output_item.done", output_index=len(self.items) - 1, item=item)


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
