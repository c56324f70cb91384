"""An answer to messages as gRPC tells it: what is said as its text, and beside it what was thought
and which tools are called."""

from collections.abc import Callable

from api.parsers.listener import Heard, Listener
from api.requests.answer import LastPiece, Piece
from protos.router_pb2 import GenerateResponse, ToolCallPart


class GrpcVoice:
    """Tells one answer."""

    def __init__(self, listener: Callable[[], Listener]) -> None:
        """
        Args:
            listener: makes one; called with the first piece, when there is a prompt.
        """
        self._make_listener = listener
        self._listener: Listener | None = None

    def tell(self, piece: Piece | LastPiece, response: GenerateResponse) -> None:
        """Puts into `response`, which has the piece, what its text is made of."""
        listener = self._listener = self._listener or self._make_listener()
        match piece:
            case LastPiece():
                _put(listener.hear(piece.text, piece.marks, last=True), response)
                if piece.finish_reason == "stop" and listener.has_called:
                    response.finish_reason = "tool_calls"
            case _:
                _put(listener.hear(piece.text, piece.marks, last=False), response)


def _put(heard: Heard, response: GenerateResponse) -> None:
    response.text = heard.content
    response.reasoning = heard.reasoning
    response.tool_calls.extend(
        ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        for part in heard.calls
    )
