"""Construction of an OpenAI response: pieces in, numbered events out."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from api.dialect.event_reply import Event
from api.dialect.origin import RequestOrigin
from api.dialect.problems import ApiError
from api.openai.response_items import ResponseOutput
from api.parsers.listener import StreamParser
from api.requests.answer import FinalChunk, OutputChunk, TokenUsage

_NOTHING_STORED = {
    "background": False,
    "metadata": {},
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


class ResponsesObject:
    """The Telling of one response."""

    def __init__(
        self, origin: RequestOrigin, echoed: dict[str, Any], listener: Callable[[], StreamParser]
    ) -> None:
        """
        Args:
            echoed: request fields that the response repeats.
            listener: makes the StreamParser. Called with the first piece, after the prompt is
                rendered.
        """
        self._origin = origin
        self._echoed = echoed
        self._make_listener = listener
        self._listener: StreamParser | None = None
        self._output = ResponseOutput()
        self._num_thought = 0  # reasoning tokens
        self._numbers = count()  # sequence numbers of events
        self.last: Event = {}  # the whole response, after it has ended

    def add(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        return map(self._numbered, self._told(piece))

    def failed(self, why: ApiError) -> Event:
        event = {"type": "error", "code": why.code, "message": str(why), "param": why.param}
        return self._numbered(event)

    def _numbered(self, event: Event) -> Event:
        return {**event, "sequence_number": next(self._numbers)}

    def _told(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        if self._listener is None:
            self._listener = self._make_listener()
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response("in_progress", None)}
        match piece:
            case FinalChunk():
                yield from self._output.add(self._listener.hear(piece.text, piece.marks, last=True))
                whole = piece.finish_reason == "stop"
                yield from self._output.end(whole=whole)
                status = "completed" if whole else "incomplete"
                self.last = self._response(status, piece)
                yield {"type": f"response.{status}", "response": self.last}
            case _:
                yield from self._output.add(
                    self._listener.hear(piece.text, piece.marks, last=False)
                )
                if self._output.kind == "reasoning":
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
