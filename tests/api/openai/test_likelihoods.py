"""Offsets of tokens in a completion's text."""

from collections.abc import Sequence

import pytest

from api.openai.replies import TextTokens
from api.requests.answer import PromptReport, TokenReport


def _tokens(*spelt: bytes) -> Sequence[TokenReport]:
    return [TokenReport(0, each, -0.5, ()) for each in spelt]


@pytest.mark.parametrize(
    "text, prompt, answer, offsets",
    [
        ("add 27", (b"add", b" ", b"27"), (b" 42",), [0, 3, 4, 6]),
        ("add 27", (b" add", b" ", b"27"), (b" 42",), [0, 3, 4, 6]),
        ("add 27", (b"<s>", b" add", b" ", b"27"), (b" 42",), [0, 0, 3, 4, 6]),
        ("<s>", (b"<s>",), (b"a", b"b"), [0, 3, 4]),
        ("é", (b"\xc3", b"\xa9"), ("ü".encode(), b"x"), [0, 0, 1, 2]),
        ("another", (b"add",), (b"x",), [0, 3]),
    ],
    ids=["plain", "a space before", "BOS", "BOS that was sent", "bytes", "unlike"],
)
def test_offsets_are_those_of_the_text(
    text: str, prompt: Sequence[bytes], answer: Sequence[bytes], offsets: list[int]
) -> None:
    """Seen failing: behind a space that the tokenizer puts before a text all were one too many."""
    tokens = TextTokens()
    first = tokens.told(_tokens(*prompt), PromptReport(text, _tokens(*prompt)))
    second = tokens.told(_tokens(*answer))
    assert first is not None and second is not None
    assert first.text_offset + second.text_offset == offsets
    assert tokens.told(()) is None
