"""One request's answer: tokens in, pieces of text and usage out."""

from collections.abc import Callable, Collection, Sequence

import msgspec
from msgspec.structs import replace

from api.requests.token_reports import ToldPrompt, ToldToken
from api.text.detokenizer import Detokenizer
from api.text.stops import Stops
from common.requests.logprobs import TokenLogprobs
from common.requests.prediction import NOTHING, Predicted
from router.token_buffer import End


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the client is not told
    predicted: Predicted | None = None  # None: it has not said what it expects


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    marks: Sequence[int] = ()  # where in the text a special token is written that marks its parts
    tokens: Sequence[ToldToken] = ()  # where log-probabilities are asked for: of all its tokens
    prompt: ToldPrompt | None = None  # in the first piece, where it is asked for


class Piece(_Told, frozen=True):
    """What one message adds."""

    text: str
    token_ids: Sequence[int]


class LastPiece(Piece, frozen=True):
    """The end of an answer."""

    finish_reason: str  # "stop" | "length"
    stop_reason: (
        str | int | None
    )  # the text that was found, or the one of its stop tokens, that ended it
    usage: Usage
    cached_tokens: int  # of the prompt, for the router's own books


class Answer:
    """Text may lag behind its tokens, where a character or a stop is not decided; the last piece
    brings what is left. Tokens after the one that completes a stop do not exist."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Stops | None,
        stop_token_ids: Collection[int] = (),
        *,
        num_prompt_tokens: int,
        min_tokens: int = 0,
        tells_cached_tokens: bool = True,
        tells_tokens: Callable[[int, TokenLogprobs], ToldToken] | None = None,
        tells_prompt: Callable[[Sequence[TokenLogprobs]], ToldPrompt] | None = None,
        silent: bool = False,
        predicts: bool = False,
    ) -> None:
        """
        Args:
            stops: what ends it; None: nothing does but its tokens.
            min_tokens: text of so many first tokens completes none of them.
            silent: there is to be no token; the one that comes does not exist.
            predicts: its client has said what it expects.
        """
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._min_tokens = min_tokens
        self._tells_cached_tokens = tells_cached_tokens
        self._tells_tokens = tells_tokens
        self._tells_prompt = tells_prompt  # until it is told
        self._silent = silent
        self._predicted = NOTHING if predicts else None
        self._cached_tokens: int | None = None  # as the first node reported them
        self.token_ids: list[int] = []  # all of it so far
        self._length = 0  # of the text so far

    def add_predicted(self, predicted: Predicted) -> None:
        """Of tokens that are added next."""
        if self._predicted is not None:
            self._predicted += predicted

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        """Keep the first report. A replay finds the KV that the first attempt computed.

        Args:
            cached_tokens: tokens of the prompt that were cached. None: the node has not reported.
        """
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def add(
        self,
        token_ids: Sequence[int],
        end: End | None,
        cached_tokens: int | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> Piece | LastPiece:
        """Must not be called again after a LastPiece.

        Args:
            cached_tokens: as of `note_cached_tokens`.
            logprobs: of these tokens, where they are told.
            prompt_logprobs: of the prompt's tokens but the first one, where they are told.
        """
        self.note_cached_tokens(cached_tokens)
        prompt, tells = None, self._tells_prompt
        if tells is not None:
            prompt, self._tells_prompt = tells(prompt_logprobs), None
        if self._silent:
            token_ids = ()
            end = end and End("length")
        piece = self._piece(token_ids, end)
        tokens: Sequence[ToldToken] = ()
        if self._tells_tokens is not None:
            tokens = [
                self._tells_tokens(*each) for each in zip(piece.token_ids, logprobs, strict=False)
            ]
        marks = self._take_marks(len(piece.text))
        if not (tokens or prompt or marks):
            return piece
        return replace(piece, tokens=tokens, prompt=prompt, marks=marks)

    def _take_marks(self, num_characters: int) -> Sequence[int]:
        """Of the next so many characters of text."""
        begun, marks = self._length, self._detokenizer.marks
        self._length += num_characters
        taken = []
        while marks and marks[0] < self._length:
            taken.append(marks.popleft() - begun)
        return taken

    def _piece(self, token_ids: Sequence[int], end: End | None) -> Piece | LastPiece:
        text, num_taken, stopped = self._text_of(token_ids)
        if not stopped and end is not None:
            rest, stopped = self._rest()
            text += rest
        taken = token_ids[:num_taken]
        self.token_ids += taken
        if stopped:
            assert self._stops is not None
            return self._last(text, taken, "stop", self._stops.found)
        if end is not None:
            reason = self._stop_token() if end.finish_reason == "stop" else None
            return self._last(text, taken, end.finish_reason, reason)
        return Piece(text, taken)

    def _stop_token(self) -> int | None:
        """None: it was EOS, of which nobody has to be told."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self._stop_token_ids else None

    def _text_of(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """The text these tokens add, how many of them count, and whether a stop is complete."""
        if self._stops is None:
            text = self._detokenizer.push(token_ids) if token_ids else ""
            return text, len(token_ids), False
        text = ""
        # One at a time: usage must tell which token completed the stop.
        for number, token in enumerate(token_ids, start=1):
            decided, stopped = self._detokenizer.push((token,)), False
            if len(self.token_ids) + number > self._min_tokens:
                decided, stopped = self._stops.push(decided)
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
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> LastPiece:
        # A node that continues an answer may have found some of that in its cache too.
        cached_tokens = min(self._cached_tokens or 0, self._num_prompt_tokens)
        told = cached_tokens if self._tells_cached_tokens else None
        usage = Usage(self._num_prompt_tokens, len(self.token_ids), told, self._in_answer())
        return LastPiece(text, token_ids, finish_reason, stop_reason, usage, cached_tokens)

    def _in_answer(self) -> Predicted | None:
        """What was right behind the end of the answer does not exist."""
        if self._predicted is None:
            return None
        accepted = min(self._predicted.accepted, len(self.token_ids))
        return Predicted(accepted, self._predicted.rejected)
