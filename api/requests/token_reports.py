"""Log-probabilities of a response's tokens and of their alternatives."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from common.requests.logprobs import TokenLogprobs

Spell: TypeAlias = Callable[[int], bytes]  # returns the bytes of a token


class Likely(msgspec.Struct, frozen=True):
    token: int
    spelt: bytes
    logprob: float | None  # None for the first token of a prompt


class ToldToken(Likely, frozen=True):
    """A token of a response or its prompt.

    `top`: likeliest tokens at its position, likeliest first.
    """

    top: Sequence[Likely]


class ToldPrompt(msgspec.Struct, frozen=True):
    """The prompt within the first piece of a response, if the client requests it.

    Attributes:
        tokens: tokens with log-probabilities: none, or all.
    """

    text: str
    tokens: Sequence[ToldToken]


def told(token: int, logprobs: TokenLogprobs, num_top: int, spell: Spell) -> ToldToken:
    pairs = zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True)
    top = [Likely(other, spell(other), logprob) for other, logprob in pairs][:num_top]
    return ToldToken(token, spell(token), logprobs.logprob, top)


def told_prompt(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
    spell: Spell,
) -> ToldPrompt:
    """Return the prompt of a response.

    Args:
        logprobs: of all tokens except the first, or none.
    """
    if not logprobs and num_top < 0:
        return ToldPrompt(text, ())
    first = ToldToken(token_ids[0], spell(token_ids[0]), None, ())
    others = zip(token_ids[1:], logprobs, strict=True)
    return ToldPrompt(text, [first, *(told(*other, num_top, spell) for other in others)])
