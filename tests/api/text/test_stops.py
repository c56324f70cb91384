"""Stop strings and regexes cut the text at the first complete match, in any split."""

import random
import re
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text import stops as stops_module
from api.text.positions import MAX_POSITIONS
from api.text.stops import (
    MAX_HELD_CHARACTERS,
    MAX_MATCH_CHARACTERS,
    Automaton,
    StopConditions,
    StopRules,
)
from common.errors import InvalidRequest

texts = st.lists(st.text("ab", max_size=12), max_size=6)
some_stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def strings(stops: list[str]) -> StopConditions:
    finder = StopRules(stops).begin()
    assert finder is not None
    return finder


def expressions(*patterns: str, stops: tuple[str, ...] = ()) -> StopConditions:
    finder = StopRules(stops, Automaton(patterns)).begin()
    assert finder is not None
    return finder


def fed(finder: StopConditions, pieces: Iterable[str]) -> tuple[str, bool]:
    """Return the text from these pieces, and whether a stop has cut it."""
    out = ""
    for piece in pieces:
        decided, stopped = finder.push(piece)
        out += decided
        if stopped:
            return out, True
    return out + finder.flush(), False


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Compute the definition, one character at a time over the whole text."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(texts, some_stops)
def test_any_split_gives_the_text_before_the_first_complete_stop(pieces, stops):
    assert fed(strings(stops), pieces) == cut("".join(pieces), stops)


@given(texts, some_stops)
def test_only_a_possible_start_of_a_stop_is_held_back(pieces, stops):
    finder = strings(stops)
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
def test_examples(pieces, stops, expected):
    assert fed(strings(stops), pieces)[0] == expected


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
    r"(?m)a[b\n]^a",
    r"(?m)(?:^a|\n)+^b",
    "(?i)[^a]B[^AB]",
    "(?i)AB",
    "(a*b*)*\\n",
    r"\w\s\w",
    "(?-i:A)|(?i:BA)",
    r"(?:a|\n)*?bb",
    "(?:){9}b{2}",
]


@given(st.lists(st.text("ab\n", max_size=8), max_size=5), st.sampled_from(EXPRESSIONS))
def test_a_regex_finds_what_python_finds(pieces, pattern):
    """The earliest end of a match, and the longest match that ends there."""
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
    stops = expressions(pattern)
    out, stopped = fed(stops, pieces)
    assert (out, stopped) == (text[:found], found is not None)
    assert not stopped or ((stops.found and compiled.fullmatch(stops.found)) or "^" in pattern)


def test_strings_and_regexes_can_be_combined():
    stops = expressions(r"\d+\.", "[!?]{2}", stops=("END",))
    assert stops.push("1 EN? 12") == ("1 EN? ", False)
    assert stops.push("3.") == ("", True)
    assert stops.found == "123."


@given(st.integers(0, 2000), st.integers(2, MAX_HELD_CHARACTERS), st.integers(1, 700))
def test_no_match_is_missed_because_of_others_that_started_before_it(num_before, length, size):
    text = "a" + "x" * num_before + "a" + "x" * (length - 2) + "b"
    found = []
    for pieces in ([text], [text[start : start + size] for start in range(0, len(text), size)]):
        stops, out, stopped = expressions("a[ax]*b"), "", False
        for piece in pieces:
            decided, stopped = stops.push(piece)
            out += decided
        found.append((stopped, out, stops.found))
        assert stopped or length > MAX_MATCH_CHARACTERS
        assert not stopped or (stops.found and out + stops.found == text)
        assert len(stops.found or "") <= MAX_HELD_CHARACTERS
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]


def test_no_more_text_is_held_back_than_promised():
    stops = expressions("a(?:.|\n)*b")
    text = out = ""
    for _ in range(3000):
        text += "ax"[bool(text)]
        out += stops.push(text[-1])[0]
        assert len(text) - len(out) <= MAX_HELD_CHARACTERS
    assert stops.push("ax--b")[1]  # one that has started after the first
    assert stops.found == "ax--b"


def test_text_that_no_longer_matches_is_released():
    """Even if another match may have started: of those that have ended, at most half is held."""
    stops = expressions("a{250}b")
    text = out = ""
    for _ in range(2000):
        text += "a"
        out += stops.push("a")[0]
        assert len(text) - len(out) <= 500


@pytest.mark.parametrize(
    "text, said",
    [
        ("a(b", "it is not a regular expression: missing )"),
        ("a*", "empty text"),
        ("(?:a|^)", "empty text"),
        ("a$", "at end is not supported"),
        (r"\bEND\b", "at boundary is not supported"),
        (r"(a)\1", "groupref is not supported"),
        ("(?=a)b", "assert is not supported"),
        ("a{600}", "too long"),
        ("a{200}(?:bc){29}", "too long"),
        ("((((a{9}){9}){9}){9}){9}", "too long"),
        ("(" * 400 + "a" + ")" * 400, "its groups are nested too deeply"),
        ("(?:){4000000000}", "empty text"),
        ("a" * 1025, "1025 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_invalid_or_unsupported_regex_is_rejected(text, said):
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        Automaton([text])


def test_all_regexes_of_a_request_share_one_limit():
    Automaton(["a{100}", "b{156}"])
    with pytest.raises(InvalidRequest, match=r"^\[1\]: it is too long"):
        Automaton(["a{100}", "b{157}"])
    with pytest.raises(InvalidRequest, match="has 5000 characters, 4096 allowed"):
        Automaton([f"[{'a' * 998}]"] * 5)


COSTLY = [
    "(?:(?:a+)+)+Z",  # with which Python's own engine would take forever
    "((a*)*b*)*Z",
    "a{250}Z",
    "(?:a|b)*a[ab]{250}Z",
    ".?" * 250 + "Z",
    "(?:" + "[ab]?" * 200 + "Y)*Z",
    "(?:(?:" * 20 + "[ab]{250}" + ")*)?" * 20 + "Z",
    "(?:.|\n)*foo",
]


@pytest.mark.parametrize("pattern", COSTLY, ids=lambda pattern: pattern[:20])
def test_a_character_costs_few_steps_with_any_regex(pattern, monkeypatch):
    """The steps of the automaton, forwards and backwards, each with as many lookups as it has
    bytes."""
    num_steps = 0

    def counted(steps: Callable[[Automaton, int, str], int]) -> Any:
        def step(wanted: Automaton, positions: int, character: str) -> int:
            nonlocal num_steps
            num_steps += 1
            assert positions.bit_length() <= MAX_POSITIONS + 1
            return steps(wanted, positions, character)

        return step

    monkeypatch.setattr(Automaton, "after", counted(Automaton.after))
    monkeypatch.setattr(Automaton, "before", counted(Automaton.before))
    draw, stops, num_characters = random.Random(1), expressions(pattern), 4000
    for text in ("a" * num_characters, "".join(draw.choices("ab", k=num_characters))):
        for character in text:
            assert not stops.push(character)[1]
    assert num_steps <= 5 * 2 * num_characters


def test_the_character_set_of_a_repetition_is_made_once():
    """It was copied for each repetition: 1,020 characters took seconds and 171 MiB."""
    tracemalloc.start()
    try:
        Automaton(["[" + "".join(chr(300 + 2 * n) for n in range(1010)) + "]{250}"])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_stop_strings_cost_nothing_before_a_text_contains_their_start(monkeypatch):
    """They are prepared late. 16 strings for each of 128 choices took 1.5 s to prepare."""
    made = 0
    initialise = stops_module._Prefix.__init__

    def counted(self: Any, *arguments: Any) -> None:
        nonlocal made
        made += 1
        initialise(self, *arguments)

    monkeypatch.setattr(stops_module._Prefix, "__init__", counted)
    rules = StopRules(["ab" * n + "c" * (1024 - 2 * n) for n in range(16)])
    finders = [rules.begin() for _ in range(128)]
    assert made == 1
    for finder in finders:
        assert finder is not None and finder.push("ab" * 40 + "x")[1] is False
    assert made < 100
