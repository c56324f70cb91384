"""A grammar whose tokens are too expensive, at once or later, is rejected before any response
uses it."""

import pytest

from common.requests.sampling import JSON_OBJECT, GuidedDecoding
from engine.grammar import trials
from engine.grammar.compilers import GrammarCompilers, prepared
from engine.grammar.trials import TooExpensive, Walks

EOS = 256
WORDS = [bytes([byte]) for byte in range(EOS)] + [b""]


class Costs:
    """A clock on which a token costs what the grammar says, and nothing else takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


class Matcher:
    """Costs a millisecond for each token, and `dear` from the token numbered `since` on."""

    dear = 1.0
    since = 0
    clock = Costs()

    def __init__(self, grammar: object) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> bool:
        self.tokens.append(token)
        return True

    def is_terminated(self) -> bool:
        return EOS in self.tokens

    def fill_next_token_bitmask(self, bits: object, row: int) -> bool:
        met = len(self.tokens) >= self.since
        self.clock.now += self.dear if met else 0.001
        return True


@pytest.fixture
def matcher(monkeypatch: pytest.MonkeyPatch) -> type[Matcher]:
    class Own(Matcher):
        clock = Costs()

    monkeypatch.setattr(trials.xgrammar, "GrammarMatcher", Own)
    monkeypatch.setattr(trials.time, "thread_time", Own.clock.thread_time)
    return Own


def test_a_grammar_that_becomes_expensive_late_is_detected(matcher: type[Matcher]) -> None:
    walks = Walks(WORDS, (EOS,))
    matcher.since = trials.NUM_TOKENS - trials._WINDOW
    with pytest.raises(TooExpensive):
        walks.check(None)
    matcher.since = trials.NUM_TOKENS
    walks.check(None)


def test_single_expensive_tokens_are_accepted(matcher: type[Matcher]) -> None:
    matcher.dear = trials.S_PER_TOKEN / 2
    Walks(WORDS, (EOS,)).check(None)


def test_a_cost_that_grows_faster_than_the_text_is_detected_early(
    matcher: type[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = Walks(WORDS, (EOS,))
    for power, refused in ((0, False), (1, False), (2, True)):

        def fill(self: Matcher, bits: object, row: int, power: int = power) -> bool:
            self.clock.now += 0.01 * (len(self.tokens) / trials.NUM_TOKENS) ** power
            return True

        monkeypatch.setattr(matcher, "fill_next_token_bitmask", fill)
        monkeypatch.setattr(trials, "WALKS_S", 1e9)
        if refused:
            with pytest.raises(TooExpensive):
                walks.check(None)
        else:
            walks.check(None)


def test_a_more_expensive_part_is_no_growth(matcher: type[Matcher]) -> None:
    matcher.dear, matcher.since = 0.02, trials.NUM_TOKENS // 2
    Walks(WORDS, (EOS,)).check(None)


def test_all_walks_together_have_a_limit(matcher: type[Matcher]) -> None:
    matcher.dear = trials.S_PER_TOKEN * 0.9
    Walks(WORDS, (EOS,)).check(None)
    assert matcher.clock.now < trials.WALKS_S + 5 * matcher.dear


def test_grammars_with_many_parses_of_a_text_are_expensive() -> None:
    """With real matchers. The regex is expensive for one repeated letter, and not for others."""
    made, walks = GrammarCompilers(WORDS, (EOS,)), Walks(WORDS, (EOS,))
    for guide in (
        GuidedDecoding("ebnf", "root ::= s\ns ::= s s | [a-z ]"),
        GuidedDecoding("regex", "((a*)*b*)*"),
    ):
        with pytest.raises(TooExpensive):
            walks.check(made.compiled(prepared(guide)))
    for guide in (
        JSON_OBJECT,
        GuidedDecoding("regex", "([a-z]+ ?)+"),
        GuidedDecoding("regex", "[0-9]{4}-[01][0-9]"),
    ):
        walks.check(made.compiled(prepared(guide)))
