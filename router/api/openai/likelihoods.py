"""Log-probabilities as OpenAI's endpoints tell them: chats by token, completions in columns."""

from collections.abc import Sequence

import msgspec

from router.requests.told_tokens import Likely, ToldToken

_LEAST = -9999.0  # JSON has no -inf


class LikelyToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Columns, an entry for each token. Of a prompt's first token there is nothing to tell."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def of_chat(tokens: Sequence[ToldToken]) -> ChatLogprobs | None:
    """None: they are not told."""
    if not tokens:
        return None
    return ChatLogprobs(
        [
            ContentToken(
                _name(token),
                _number(token),
                list(token.spelt),
                [LikelyToken(_name(top), _number(top), list(top.spelt)) for top in token.top],
            )
            for token in tokens
        ]
    )


class TextTokens:
    """Of one completion, whose tokens come in order.

    Offsets count the characters of the tokens before, each by itself.
    """

    def __init__(self) -> None:
        self._offset = 0

    def told(self, tokens: Sequence[ToldToken]) -> TextLogprobs | None:
        """None: they are not told."""
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.spelt.decode(errors="replace"))
        return TextLogprobs(
            offsets,
            [None if token.logprob is None else _number(token) for token in tokens],
            [_name(token) for token in tokens],
            [_likeliest(token) for token in tokens],
        )


def _likeliest(token: ToldToken) -> dict[str, float] | None:
    """The token itself is always among them."""
    if token.logprob is None:
        return None
    return {_name(each): _number(each) for each in (*token.top, token)}


def _name(token: Likely) -> str:
    """Its text; of a part of a character, its bytes."""
    try:
        return token.spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelt)


def _number(token: Likely) -> float:
    return _LEAST if token.logprob is None else max(token.logprob, _LEAST)
