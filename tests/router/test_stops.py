"""Stop strings cut the text at the one that is complete first, in any split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopStrings

words = st.text("ab", max_size=12)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The meaning, one character at a time over the whole text."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(st.lists(words, max_size=6), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_any_split_gives_the_text_before_the_first_complete_stop(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopStrings(stops)
    out = ""
    for piece in pieces:
        decided, stopped = finder.push(piece)
        out += decided
        if stopped:
            break
    else:
        stopped = False
        out += finder.flush()
    assert (out, stopped) == cut("".join(pieces), stops)


@given(st.lists(words, max_size=6), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_only_what_may_be_the_start_of_a_stop_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopStrings(stops)
    text = out = ""
    for piece in pieces:
        text += piece
        decided, stopped = finder.push(piece)
        out += decided
        if stopped:
            return
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    "pieces, stops, expected",
    [
        (["STOP"], ["STOP"], ""),
        (["one ST", "OP two"], ["STOP"], "one "),
        (["one ST", "ART"], ["STOP"], "one START"),
        (["oneSTOPtwo"], ["STOP"], "one"),
        (["aaab"], ["aab"], "a"),
        (["x", "abc"], ["abc", "b"], "xa"),
        (["xabc"], ["abc", "bc"], "x"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: str) -> None:
    finder = StopStrings(stops)
    out = ""
    for piece in pieces:
        decided, stopped = finder.push(piece)
        out += decided
        if stopped:
            assert out == expected
            return
    assert out + finder.flush() == expected
