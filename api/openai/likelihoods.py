"""Log-probabilities in OpenAI's formats: by token in chats, in columns in completions."""

import codecs
from collections.abc import Sequence

import msgspec

from api.requests.token_reports import LikelyTokenText, PromptReport, TokenReport

_utf8 = codecs.getincrementaldecoder("utf-8")
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
    """Columns with an entry for each token. The first token of a prompt has no values."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def of_chat(tokens: Sequence[TokenReport]) -> ChatLogprobs | None:
    """Return log-probabilities of a chat, None if they are not requested."""
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
    """Tokens of one completion, in order.

    An offset counts the characters of the text before a token. Tokens of the same character share
    its offset.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = _utf8("replace")

    def told(
        self, tokens: Sequence[TokenReport], prompt: PromptReport | None = None
    ) -> TextLogprobs | None:
        """Return log-probabilities of the next tokens, None if they are not requested.

        Args:
            prompt: the prompt, if `tokens` begin with its tokens.
        """
        if not tokens:
            return None
        if prompt is not None:
            self._offset -= _num_beside(prompt)
        offsets = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(token.spelt))
        return TextLogprobs(
            offsets,
            [None if token.logprob is None else _number(token) for token in tokens],
            [_name(token) for token in tokens],
            [_likeliest(token) for token in tokens],
        )


def _num_beside(prompt: PromptReport) -> int:
    """Return the number of characters of a prompt's tokens that precede its text.

    These are the BOS token and a space that the tokenizer puts before a text.
    """
    spelt = b"".join(token.spelt for token in prompt.tokens).decode(errors="replace")
    return len(spelt) - len(prompt.text) if spelt.endswith(prompt.text) else 0


def _likeliest(token: TokenReport) -> dict[str, float] | None:
    """Return the likeliest tokens. The token itself is always among them."""
    if token.logprob is None:
        return None
    return {_name(each): _number(each) for each in (*token.top, token)}


def _name(token: LikelyTokenText) -> str:
    """Return a token's text. A part of a character is returned as its bytes."""
    try:
        return token.spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelt)


def _number(token: LikelyTokenText) -> float:
    return _LEAST if token.logprob is None else max(token.logprob, _LEAST)
