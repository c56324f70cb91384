"""The finish conditions of requests. Only this module decides whether a token ends a request."""

from collections.abc import Sequence

from grpc import StatusCode

from engine.batch.batch import NOT_FINITE
from engine.batch.request import FinishReason, Request, RequestEnd


def _fault(sentence: str) -> RequestEnd:
    return RequestEnd(FinishReason.ERROR, sentence, StatusCode.INTERNAL)


class FinishRule:
    """The finish conditions of one model."""

    def __init__(self, eos_token_ids: Sequence[int], vocabulary_size: int) -> None:
        self._eos = frozenset(eos_token_ids)
        self.vocabulary_size = vocabulary_size

    def decide(self, request: Request, token: int, at_limit: bool) -> RequestEnd | None:
        """Return how `token`, the newest, ends the request, or None if the request continues.

        A stop token that is also the last one allowed counts as STOP, because nothing was cut off.

        Args:
            at_limit: with this token it has as many tokens as allowed.
        """
        if request.to_finish is not None:
            return request.to_finish
        if token == NOT_FINITE:
            return _fault("the model's logits were not finite")
        if not 0 <= token < self.vocabulary_size:
            return _fault(f"token {token} is outside the vocabulary")
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            return RequestEnd(FinishReason.STOP)
        if token in self._eos and sampling.ends_at_eos:
            return RequestEnd(FinishReason.STOP)
        return RequestEnd(FinishReason.LENGTH) if at_limit else None
