"""A response as messages of gRPC: its pieces, and the reasoning and tool calls of a chat."""

from collections.abc import Callable, Sequence
from typing import Any

from api.parsers.listener import ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.token_reports import TokenReport
from protos.router_pb2 import GenerateResponse, ToolCallPart, Usage
from protos.sampling_pb2 import Logprobs


def response_to(request_id: str, piece: OutputChunk | FinalChunk) -> GenerateResponse:
    """Return a piece of a response as a message."""
    end = _end(piece) if isinstance(piece, FinalChunk) else {}
    # The first token of a prompt has no log-probability.
    prompt = () if piece.prompt is None else piece.prompt.tokens[1:]
    return GenerateResponse(
        request_id=request_id,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=_logprobs(piece.tokens),
        prompt_logprobs=_logprobs(prompt),
        **end,
    )


def _end(piece: FinalChunk) -> dict[str, Any]:
    usage, predicted, reason = piece.usage, piece.usage.predicted, piece.stop_reason
    return {
        "stop_string": reason if isinstance(reason, str) else None,
        "stop_token_id": reason if isinstance(reason, int) else None,
        "finish_reason": piece.finish_reason,
        "usage": Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            accepted_prediction_tokens=predicted.accepted if predicted else None,
            rejected_prediction_tokens=predicted.rejected if predicted else None,
        ),
    }


def _logprobs(tokens: Sequence[TokenReport]) -> Logprobs | None:
    if not tokens:
        return None
    return Logprobs(
        logprob=[token.logprob or 0.0 for token in tokens],
        num_top=len(tokens[0].top),
        top_token=[other.token for token in tokens for other in token.top],
        top_logprob=[other.logprob or 0.0 for token in tokens for other in token.top],
    )


class GrpcResponseWriter:
    """Writer of the text, reasoning and tool calls of one chat response."""

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
        last = isinstance(piece, FinalChunk)
        _put(listener.hear(piece.text, piece.marks, last=last), response)
        if response.finish_reason == "stop" and listener.has_called:
            response.finish_reason = "tool_calls"


def _put(heard: ParsedText, response: GenerateResponse) -> None:
    response.text = heard.content
    response.reasoning = heard.reasoning
    response.tool_calls.extend(
        ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        for part in heard.calls
    )
