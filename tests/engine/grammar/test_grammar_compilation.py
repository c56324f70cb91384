"""Grammar compilations that take too long are stopped, and do not delay small ones."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidRequest, Overloaded
from common.requests.sampling import JSON_OBJECT, GuidedDecoding, Prepared
from engine.grammar import compilers, matching
from engine.grammar.compilers import prepared
from engine.grammar.grammar_verifier import GrammarTimeout, SubprocessVerifier, VerifierLane
from engine.grammar.guides import MAX_SLOW, MAX_WAITING, GrammarCache
from engine.grammar.matching import MatchThreads
from tests.support.models.noise_model import SPECIAL_TOKENS, write

WAIT_S = 300.0
VOCABULARY = 256 + len(SPECIAL_TOKENS)
EOS = (VOCABULARY - 1,)
SMALL = GuidedDecoding("regex", "[0-9]+")
# Minutes of a core, and five thousand characters.
ENDLESS = GuidedDecoding(
    "regex", f"({'|'.join(f'(x{{0,{most}}}y)*' for most in range(400))}){{0,200}}"
)


AMBIGUOUS = GuidedDecoding("ebnf", "root ::= s\ns ::= s s | [a-z ]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guides") / "model"
    write(directory)
    return directory


class Gate:
    """A verifier for which all grammars except one are slow, and whose slow lane is blocked."""

    def __init__(self) -> None:
        self.open = Event()

    def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
        if guide == SMALL:
            return prepared(guide)
        if lane is VerifierLane.QUICK:
            raise GrammarTimeout("too slow")
        assert self.open.wait(WAIT_S)
        raise GrammarTimeout("too slow for the slow lane")

    def close(self) -> None:
        self.open.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def guides(model: Path, gate: Gate) -> Iterator[GrammarCache]:
    guides = GrammarCache(model, VOCABULARY, EOS, gate)
    yield guides
    guides.close()


def _slow(number: int) -> GuidedDecoding:
    return GuidedDecoding("regex", f"a{{{number}}}")


def test_slow_grammars_wait_for_each_other_and_delay_no_small_ones(
    guides: GrammarCache, gate: Gate
) -> None:
    slow = [guides.compiled(_slow(number)) for number in range(MAX_SLOW)]
    assert guides.compiled(SMALL).result(WAIT_S) is not None
    assert not any(each.done() for each in slow)
    gate.open.set()
    for each in slow:
        assert isinstance(each.exception(WAIT_S), InvalidRequest)


def test_too_many_slow_grammars_are_rejected_as_overload_which_is_not_cached(
    guides: GrammarCache, gate: Gate
) -> None:
    for number in range(MAX_SLOW):
        guides.compiled(_slow(number))
    one_more = _slow(MAX_SLOW)
    assert isinstance(guides.compiled(one_more).exception(WAIT_S), Overloaded)
    gate.open.set()
    assert isinstance(guides.compiled(_slow(0)).exception(WAIT_S), InvalidRequest)
    first = guides.compiled(_slow(MAX_SLOW - 1))
    assert isinstance(first.exception(WAIT_S), InvalidRequest)
    assert isinstance(guides.compiled(one_more).exception(WAIT_S), InvalidRequest)


def test_the_result_of_a_grammar_is_cached(guides: GrammarCache, gate: Gate) -> None:
    gate.open.set()
    assert guides.compiled(SMALL) is guides.compiled(SMALL)
    refused = guides.compiled(_slow(1))
    assert isinstance(refused.exception(WAIT_S), InvalidRequest)
    assert guides.compiled(_slow(1)) is refused


def test_the_number_of_waiting_grammars_is_limited(model: Path) -> None:
    class Shut(Gate):
        def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
            assert self.open.wait(WAIT_S)
            return prepared(guide)

    guides = GrammarCache(model, VOCABULARY, EOS, Shut())
    for number in range(MAX_WAITING):
        guides.compiled(_slow(number))
    with pytest.raises(Overloaded):
        guides.compiled(SMALL)
    guides.close()


def test_the_size_of_a_grammar_is_limited(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilers.GrammarCompilers.of_model(model, VOCABULARY, EOS)
    small = prepared(SMALL)
    size = made.compiled(small).memory_size_bytes
    monkeypatch.setattr(compilers, "MAX_GRAMMAR_BYTES", size)
    made.compiled(small)
    monkeypatch.setattr(compilers, "MAX_GRAMMAR_BYTES", size - 1)
    with pytest.raises(InvalidRequest, match="MiB"):
        made.compiled(small)


# Seen failing without the deadline: the first grammar blocks the quick lane forever.
@pytest.mark.timeout(60)
def test_a_verifier_process_that_never_answers_is_overload_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    verifier = SubprocessVerifier(tmp_path, VOCABULARY, EOS, deadline_s=0.1)
    try:
        for lane in VerifierLane:  # the second request goes to a new process
            with pytest.raises(Overloaded):
                verifier.verify(SMALL, lane)
    finally:
        verifier.close()


# Seen failing with costs by the clock of the process, which RLIMIT_CPU makes coarse, and with walks
# that use the bits after the last token as tokens: then the tokens of a text cost nothing.
def test_a_trial_rejects_a_grammar_with_many_parses_of_a_text(model: Path) -> None:
    verifier = SubprocessVerifier(model, VOCABULARY, EOS)
    try:
        with pytest.raises(InvalidRequest, match="less ambiguous"):
            verifier.verify(AMBIGUOUS, VerifierLane.SLOW)
        verifier.verify(SMALL, VerifierLane.QUICK)
    finally:
        verifier.close()


@pytest.mark.long
def test_a_trial_that_would_not_end_is_killed(model: Path) -> None:
    """The kernel kills it in its own process, so the next trial is not affected."""
    verifier = SubprocessVerifier(model, VOCABULARY, EOS)
    try:
        verifier.verify(JSON_OBJECT, VerifierLane.SLOW)
        with pytest.raises(GrammarTimeout):
            verifier.verify(ENDLESS, VerifierLane.QUICK)
        verifier.verify(SMALL, VerifierLane.QUICK)
        with pytest.raises(InvalidRequest, match=r"sampling\.json_schema: it is not valid JSON"):
            verifier.verify(GuidedDecoding("json_schema", "no schema"), VerifierLane.QUICK)
        assert verifier.verify(SMALL, VerifierLane.QUICK) == Prepared("regex", SMALL.text)
        assert verifier.helper.pid is not None
        os.kill(verifier.helper.pid, signal.SIGKILL)
        with pytest.raises(Overloaded):
            verifier.verify(SMALL, VerifierLane.QUICK)
        verifier.verify(SMALL, VerifierLane.QUICK)
    finally:
        verifier.close()


def test_the_engine_compiles_what_the_verifier_has_made_of_a_guide(model: Path) -> None:
    """Not the request's own text, whose preparation may take seconds under its lock."""

    class Rewriting(Gate):
        def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
            return Prepared("regex", SMALL.text)

    guides = GrammarCache(model, VOCABULARY, EOS, Rewriting())
    assert guides.compiled(GuidedDecoding("json_schema", "no schema")).result(WAIT_S) is not None
    guides.close()


class Stuck:
    """A matcher that waits while the gate is closed."""

    spending_s = 0.0

    def __init__(self, gate: Event) -> None:
        self.compiled = SimpleNamespace(slow=False)
        self.busy = False
        self._gate = gate

    def drive(self) -> None:
        assert self._gate.wait(WAIT_S)
        self.busy = False


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_late_matcher_delays_no_other_one(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(matching, "_STARVED_S", 0.01)
    late, notified = Event(), Event()
    ready = Event()
    ready.set()
    matches: list[Any] = [Stuck(gate) for gate in (ready, late, ready, ready, ready)]
    threads = MatchThreads(notified.set, num_threads)
    for _ in range(2):
        threads.drive([each for each in matches if not each.busy])
        assert [each.busy for each in matches] == [False, True, False, False, False]
        assert [each.compiled.slow for each in matches] == [False, True, False, False, False]
    assert not notified.is_set()
    late.set()
    assert notified.wait(WAIT_S) and not matches[1].busy
    threads.close()
