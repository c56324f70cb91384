"""One request's answer: tokens in, pieces of text and usage out."""

from collections.abc import Sequence

import msgspec

from router.requests.token_buffer import End
from router.text.detokenizer import Detokenizer
from router.text.stops import StopStrings


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the client is not told


class Piece(msgspec.Struct, frozen=True):
    """What one message adds."""

    text: str
    token_ids: Sequence[int]


class LastPiece(Piece, frozen=True):
    """The end of an answer."""

    finish_reason: str  # "stop" | "length"
    usage: Usage
    cached_tokens: int  # of the prompt, for the router's own books


class Answer:
    """Text may lag behind its tokens, where a character or a stop string is not decided; the last
    piece brings what is left. Tokens after the one that completes a stop string do not exist."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        num_prompt_tokens: int,
        tells_cached_tokens: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop) if stop else None
        self._num_prompt_tokens = num_prompt_tokens
        self._tells_cached_tokens = tells_cached_tokens
        self.token_ids: list[int] = []  # all of it so far

    def add(
        self, token_ids: Sequence[int], end: End | None, cached_tokens: int = 0
    ) -> Piece | LastPiece:
        """Must not be called again after a LastPiece.

        Args:
            cached_tokens: of the prompt, as far as is known; for the LastPiece.
        """
        text, num_taken, stopped = self._text_of(token_ids)
        if not stopped and end is not None:
            rest, stopped = self._rest()
            text += rest
        taken = token_ids[:num_taken]
        self.token_ids += taken
        if stopped:
            return self._last(text, taken, "stop", cached_tokens)
        if end is not None:
            return self._last(text, taken, end.finish_reason, cached_tokens)
        return Piece(text, taken)

    def _text_of(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """The text these tokens add, how many of them count, and whether a stop is complete."""
        if self._stops is None:
            text = self._detokenizer.push(token_ids) if token_ids else ""
            return text, len(token_ids), False
        text = ""
        # One at a time: usage must tell which token completed the stop.
        for number, token in enumerate(token_ids, start=1):
            decided, stopped = self._stops.push(self._detokenizer.push((token,)))
            text += decided
            if stopped:
                return text, number, True
        return text, len(token_ids), False

    def _rest(self) -> tuple[str, bool]:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest, False
        decided, stopped = self._stops.push(rest)
        return (decided, True) if stopped else (decided + self._stops.flush(), False)

    def _last(
        self, text: str, token_ids: Sequence[int], finish_reason: str, cached_tokens: int
    ) -> LastPiece:
        # A node that continues an answer may have found some of that in its cache too.
        cached_tokens = min(cached_tokens, self._num_prompt_tokens)
        told = cached_tokens if self._tells_cached_tokens else None
        usage = Usage(self._num_prompt_tokens, len(self.token_ids), told)
        return LastPiece(text, token_ids, finish_reason, usage, cached_tokens)
