"""A response to messages over gRPC: content as text, with reasoning and tool calls."""

from collections.abc import Callable

from api.parsers.listener import ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk
from protos.router_pb2 import GenerateResponse, ToolCallPart


class GrpcResponseWriter:
    """Writer of one response."""

    def __init__(self, listener: Callable[[], StreamParser]) -> None:
        """
        Args:
            listener: makes the StreamParser. Called with the first piece, after the prompt is
                rendered.
        """
        self._make_listener = listener
        self._listener: StreamParser | None = None

    def tell(self, piece: OutputChunk | FinalChunk, response: GenerateResponse) -> None:
        """Fill in text, reasoning and tool calls of `response`, which already has the piece."""
        listener = self._listener = self._listener or self._make_listener()
        match piece:
            case FinalChunk():
                _put(listener.hear(piece.text, piece.marks, last=True), response)
                if piece.finish_reason == "stop" and listener.has_called:
                    response.finish_reason = "tool_calls"
            case _:
                _put(listener.hear(piece.text, piece.marks, last=False), response)


def _put(heard: ParsedText, response: GenerateResponse) -> None:
    response.text = heard.content
    response.reasoning = heard.reasoning
    response.tool_calls.extend(
        ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        for part in heard.calls
    )
