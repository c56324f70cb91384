"""What an answer tells of single tokens: how likely they were, and which others might have come."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from common.requests.logprobs import TokenLogprobs

Spell: TypeAlias = Callable[[int], bytes]  # the bytes that a token stands for


class Likely(msgspec.Struct, frozen=True):
    token: int
    spelt: bytes
    logprob: float | None  # None: of a prompt's first token, which follows nothing


class ToldToken(Likely, frozen=True):
    """A token of an answer, or of its prompt. top: likeliest tokens at its place, in falling
    order."""

    top: Sequence[Likely]


class ToldPrompt(msgspec.Struct, frozen=True):
    """Of the first piece of an answer whose client wants its prompt told.

    tokens: those that log-probabilities are told of: none, or all.
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
    """
    Args:
        logprobs: of all tokens but the first, or none.
    """
    if not logprobs and num_top < 0:
        return ToldPrompt(text, ())
    first = ToldToken(token_ids[0], spell(token_ids[0]), None, ())
    others = zip(token_ids[1:], logprobs, strict=True)
    return ToldPrompt(text, [first, *(told(*other, num_top, spell) for other in others)])
