"""Log-probabilities of a response's tokens and of their alternatives."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from common.requests.logprobs import TokenLogprobs

Spell: TypeAlias = Callable[[int], bytes]  # returns the bytes of a token


class LikelyTokenText(msgspec.Struct, frozen=True):
    token: int
    spelt: bytes
    logprob: float | None  # None for the first token of a prompt


class TokenReport(LikelyTokenText, frozen=True):
    """A token of a response or its prompt.

    `top`: likeliest tokens at its position, likeliest first.
    """

    top: Sequence[LikelyTokenText]


class PromptReport(msgspec.Struct, frozen=True):
    """The prompt within the first piece of a response, if the client requests it.

    Attributes:
        tokens: tokens with log-probabilities: none, or all.
    """

    text: str
    tokens: Sequence[TokenReport]


def told(token: int, logprobs: TokenLogprobs, num_top: int, spell: Spell) -> TokenReport:
    pairs = zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True)
    top = [LikelyTokenText(other, spell(other), logprob) for other, logprob in pairs][:num_top]
    return TokenReport(token, spell(token), logprobs.logprob, top)


def told_prompt(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
    spell: Spell,
) -> PromptReport:
    """Return the prompt of a response.

    Args:
        logprobs: of all tokens except the first, or none.
    """
    if not logprobs and num_top < 0:
        return PromptReport(text, ())
    first = TokenReport(token_ids[0], spell(token_ids[0]), None, ())
    others = zip(token_ids[1:], logprobs, strict=True)
    return PromptReport(text, [first, *(told(*other, num_top, spell) for other in others)])
