"""Stop strings and expressions cut the text at what is complete first, in any split."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router.text.expressions import MAX_NODES, expression
from router.text.stops import MAX_MATCH_CHARACTERS, Stops, StopStrings, stops_of

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
    finder = Stops([StopStrings(stops)])
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
    finder = Stops([StopStrings(stops)])
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
    finder = Stops([StopStrings(stops)])
    out = ""
    for piece in pieces:
        decided, stopped = finder.push(piece)
        out += decided
        if stopped:
            assert out == expected
            return
    assert out + finder.flush() == expected


EXPRESSIONS = [
    "ab",
    "a+b",
    "(?:ab|b)a",
    "a{2,3}b?a",
    "(a|bb){2}",
    "[^a]b+",
    "a.b",
    "(?s)a.b",
    "^b",
    "(?m)^b",
    "(?i)AB",
    "(a*b*)*\\n",
    r"\w\s\w",
    "(?-i:A)|(?i:BA)",
    r"(?:a|\n)*?bb",
    "(?:){9}b{2}",
]


@given(st.lists(st.text("ab\n", max_size=8), max_size=5), st.sampled_from(EXPRESSIONS))
def test_an_expression_finds_what_python_finds(pieces: list[str], pattern: str) -> None:
    """Of all places where a match ends the first, and there the longest."""
    text, compiled = "".join(pieces), re.compile(pattern)
    found = next(
        (
            start
            for end in range(1, len(text) + 1)
            for start in range(end)
            if compiled.fullmatch(text, start, end)
        ),
        None,
    )
    stops = stops_of((), [expression(pattern)])
    assert stops is not None
    out = ""
    for piece in pieces:
        decided, stopped = stops.push(piece)
        out += decided
        if stopped:
            break
    else:
        stopped = False
        out += stops.flush()
    assert (out, stopped) == (text[:found], found is not None)
    assert not stopped or ((stops.found and compiled.fullmatch(stops.found)) or "^" in pattern)


def test_strings_and_expressions_stand_beside_each_other() -> None:
    stops = stops_of(["END"], [expression(r"\d+\."), expression("[!?]{2}")])
    assert stops is not None
    assert stops.push("1 EN? 12") == ("1 EN? ", False)
    assert stops.push("3.") == ("", True)
    assert stops.found == "123."


def test_no_more_text_is_held_back_than_a_match_may_have() -> None:
    stops = stops_of((), [expression("a(?:.|\n)*b")])
    assert stops is not None
    text = "a" + "x" * (MAX_MATCH_CHARACTERS - 1)
    assert stops.push(text) == ("", False)
    assert stops.push("b") == (text + "b", False)  # "a" may have begun it no more
    assert stops.push("ax" * 512) == ("", False)
    assert stops.push("ax--b")[1]  # but one behind the first
    assert stops.found and len(stops.found) < MAX_MATCH_CHARACTERS


@pytest.mark.parametrize(
    "text, said",
    [
        ("a(b", "it is no regular expression: missing )"),
        ("a*", "empty text"),
        ("(?:a|^)", "empty text"),
        ("a$", "at end is not known"),
        (r"\bEND\b", "at boundary is not known"),
        (r"(a)\1", "groupref is not known"),
        ("(?=a)b", "assert is not known"),
        ("a{600}", "too long"),
        ("((((a{9}){9}){9}){9}){9}", "too long"),
        ("(" * 400 + "a" + ")" * 400, "too many groups"),
        ("(?:){4000000000}", "empty text"),
        ("a" * 1025, "1025 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_expression_that_can_be_looked_for_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        expression(text)


def test_no_expression_takes_longer_than_it_has_nodes() -> None:
    """One over which Python's own engine would sit for ever."""
    stops = stops_of((), [expression("(?:(?:a+)+)+b")])
    assert stops is not None
    told, stopped = stops.push("a" * 4000)
    assert not stopped and len(told) >= 4000 - MAX_MATCH_CHARACTERS
    assert stops.push("b")[1]
    assert len(expression("(?:a|b|c){100}d").nodes) < MAX_NODES
