"""Log-probabilities of one response, in SGLang's format."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from api.requests.answer import LikelyTokenText, OutputChunk, TokenReport

# Log-probability, token id, and the token's text if requested. The first token has no
# log-probability.
TokenLogprob: TypeAlias = tuple[float | None, int, str | None]
TokenLogprobs: TypeAlias = list[TokenLogprob] | msgspec.UnsetType
# The most likely tokens at each position, in descending order.
TopLogprobs: TypeAlias = list[list[TokenLogprob] | None] | msgspec.UnsetType


class LogprobOptions(msgspec.Struct, frozen=True):
    """The log-probabilities that a request asks for.

    Attributes:
        requested: any log-probabilities are returned.
        prompt_start: index of the first prompt token to include. -1: no prompt.
        num_top: number of most likely tokens at each position.
        with_text: tokens have their text.
    """

    requested: bool = False
    prompt_start: int = -1
    num_top: int = 0
    with_text: bool = False


class LogprobFields(msgspec.Struct, kw_only=True):
    """Fields of a response. Those not requested are unset."""

    input_token_logprobs: TokenLogprobs = msgspec.UNSET
    output_token_logprobs: TokenLogprobs = msgspec.UNSET
    input_top_logprobs: TopLogprobs = msgspec.UNSET
    output_top_logprobs: TopLogprobs = msgspec.UNSET


class CollectedLogprobs:
    """The log-probabilities of a response so far."""

    def __init__(self, options: LogprobOptions) -> None:
        self._options = options
        self._prompt: list[TokenLogprob] = []
        self._prompt_top: list[list[TokenLogprob] | None] = []
        self._tokens: list[TokenLogprob] = []
        self._top: list[list[TokenLogprob] | None] = []

    def add(self, piece: OutputChunk) -> int:
        """Add the log-probabilities of a piece. Return their number."""
        if not self._options.requested:
            return 0
        prompt: Sequence[TokenReport] = ()
        if piece.prompt is not None:
            prompt = piece.prompt.tokens[self._options.prompt_start :]
            # SGLang returns none for the first token, even if tokens precede it.
            self._prompt = [(None, prompt[0].token, self._text(prompt[0]))]
            self._prompt += map(self._entry, prompt[1:])
            self._prompt_top = [None, *map(self._top_entries, prompt[1:])]
        self._tokens += map(self._entry, piece.tokens)
        self._top += map(self._top_entries, piece.tokens)
        return (len(prompt) + len(piece.tokens)) * (1 + self._options.num_top)

    def fill(self, fields: LogprobFields) -> None:
        """Set the fields that the request asks for."""
        if not self._options.requested:
            return
        fields.output_token_logprobs = self._tokens
        fields.input_token_logprobs = self._prompt
        if self._options.num_top:
            fields.output_top_logprobs = self._top
            fields.input_top_logprobs = self._prompt_top

    def _top_entries(self, token: TokenReport) -> list[TokenLogprob]:
        return [self._entry(each) for each in token.top]

    def _entry(self, token: LikelyTokenText) -> TokenLogprob:
        return token.json_logprob, token.token, self._text(token)

    def _text(self, token: LikelyTokenText) -> str | None:
        return token.spelt.decode(errors="replace") if self._options.with_text else None
