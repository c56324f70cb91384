"""Harmony's channels under a grammar: after any reasoning only requested messages are possible,
marked with special tokens."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import xgrammar

from api.parsers.harmony import Channels
from api.parsers.model_format import ModelFormat
from api.parsers.source import StreamParser
from common.requests.sampling import GuidedDecoding, as_form, tag
from engine.grammar.compilers import GrammarCompilers, prepared
from engine.grammar.matching import allows, words_of

MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|endoftext|>",
)
TOKENS = {marker: 256 + number for number, marker in enumerate(MARKERS)}
ENDS = {TOKENS[marker] for marker in MARKERS[5:]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
THOUGHT = "<|channel|>analysis<|message|>hm,\n\t<b> {ü}<|end|><|start|>assistant"


def call(name: str, arguments: str, channel: str = "<|channel|>commentary") -> str:
    return f"{channel} to=functions.{name} <|constrain|>json<|message|>{arguments}"


def called(name: str, arguments: str) -> str:
    """Return a call, with the recipient in the role or in the channel."""
    return f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}"


PARIS = call("get", '{"city": "Paris", "days": 3}')
MORE = called("get.more", '{"a": [1, "b"]}')
CALL_ENDS = "<|call|>"


@pytest.fixture(scope="module")
def made() -> GrammarCompilers:
    """Return compilers for a vocabulary with one token for each byte and one for each marker."""
    words = [bytes([byte]) for byte in range(256)] + [b""] * len(MARKERS)
    return GrammarCompilers(words, sorted(ENDS))


@pytest.fixture(scope="module")
def calls() -> Mapping[bool, GuidedDecoding]:
    """Return grammars for required calls, by whether there may be several."""
    tools = [("get", SCHEMA), ("get.more", {"type": "object"})]
    channels = Channels(TOKENS)
    return {many: tag(channels.calls(tools, parallel=many)) for many in (False, True)}


def _ids(text: str) -> list[int]:
    """Return the tokens of markers."""
    ids: list[int] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        ids += [TOKENS[part]] if part in TOKENS else part.encode()
    return ids


def _mask(matcher: Any) -> Any:
    bits = np.full((1, words_of(256 + len(MARKERS))), -1, np.int32)
    matcher.fill_next_token_bitmask(bits, 0)
    return bits[0]


def _follow(made: GrammarCompilers, guide: GuidedDecoding, ids: list[int]) -> Any:
    """Return a matcher after these tokens, or None if a mask forbids one of them."""
    matcher = xgrammar.GrammarMatcher(made.compiled(prepared(guide)))
    for token in ids:
        if not allows(_mask(matcher), token):
            return None
        assert matcher.accept_token(token)
    return matcher


def _follows(made: GrammarCompilers, guide: GuidedDecoding, ids: list[int]) -> bool:
    """Return whether a response can consist of these tokens, each of which its mask allows."""
    matcher = _follow(made, guide, ids)
    return matcher is not None and bool(matcher.is_terminated())


def _ends(made: GrammarCompilers, guide: GuidedDecoding, text: str) -> set[int]:
    """Return the tokens with which a response of this text can end."""
    matcher = _follow(made, guide, _ids(text))
    if matcher is None:
        return set()
    mask, found = _mask(matcher), set()
    for token in ENDS:
        if allows(mask, token):
            assert matcher.accept_token(token)
            if matcher.is_terminated():
                found.add(token)
            matcher.rollback(1)
    return found


@pytest.mark.parametrize(
    "answer",
    [PARIS, THOUGHT + PARIS, MORE, THOUGHT + MORE],
    ids=["a call", "thought first", "another", "another behind thought"],
)
def test_a_response_with_a_required_call_may_start_with_reasoning(
    made: GrammarCompilers, calls: Mapping[bool, GuidedDecoding], answer: str
) -> None:
    for guide in calls.values():
        assert _ends(made, guide, answer) == ENDS
        assert not _follows(made, guide, _ids(answer))
    more = f"{answer}<|end|><|start|>assistant{PARIS}{CALL_ENDS}"
    assert _follows(made, calls[True], _ids(more))
    assert not _follows(made, calls[False], _ids(more))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "hello",
        '[{"name": "get", "parameters": {"city": "Paris", "days": 3}}]',
        "<|channel|>final<|message|>hello",
        "<|channel|>commentary<|message|>hello<|end|><|start|>assistant" + PARIS,
        "<|channel|>analysis<|message|>hm",
        "<|channel|>analysis<|message|>hm<|end|>",
        "<|channel|>analysis<|message|>hm<|channel|>final<|message|>x<|end|><|start|>assistant"
        + PARIS,
        THOUGHT + THOUGHT + PARIS,
        THOUGHT + "<|channel|>final<|message|>hello",
        call("other", "{}"),
        call("ge", '{"city": "Paris", "days": 3}'),
        call("get", '{"city": "Paris"}'),
        call("get", '{"city": "Paris", "days": "3"}'),
        call("get", '{"city": "a\nb", "days": 3}'),
        call("get", '{"city": "a<|end|>b", "days": 3}'),
        call("get.more", "[]"),
        call("get.more", ""),
        PARIS.replace("<|constrain|>json", "<|constrain|>xml"),
    ],
)
def test_a_response_with_a_required_call_has_no_other_content(
    made: GrammarCompilers, calls: Mapping[bool, GuidedDecoding], answer: str
) -> None:
    for guide in calls.values():
        assert not _ends(made, guide, answer)


FINAL, PREAMBLE = (f"<|channel|>{each}<|message|>{{so: [TOOL" for each in ("final", "commentary"))
AND = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def free(made: GrammarCompilers) -> Mapping[bool, GuidedDecoding]:
    """Return grammars for optional calls, by whether there may be several."""
    tools = [("get", SCHEMA), ("get.more", {"type": "object"}), ("no header's", {})]
    channels = Channels(TOKENS)
    return {many: tag(channels.free(tools, parallel=many)) for many in (False, True)}


@pytest.mark.parametrize(
    "answer",
    [
        FINAL,
        THOUGHT + FINAL,
        f"{THOUGHT}{PREAMBLE}{AND}{FINAL}",
        "",
        "in the midst of one",
        f"in the midst of one{AND}{FINAL}",
    ],
)
def test_a_response_without_a_required_call_is_free(
    made: GrammarCompilers, free: Mapping[bool, GuidedDecoding], answer: str
) -> None:
    for guide in free.values():
        assert _ends(made, guide, answer) == ENDS


@pytest.mark.parametrize("before", ["", THOUGHT, f"{THOUGHT}{PREAMBLE}{AND}"])
@pytest.mark.parametrize("one", [PARIS, MORE, called("get", '{"city": "x", "days": 1}')])
def test_an_optional_call_is_complete(
    made: GrammarCompilers, free: Mapping[bool, GuidedDecoding], before: str, one: str
) -> None:
    for guide in free.values():
        assert _follows(made, guide, _ids(before + one + CALL_ENDS))
    for more in (PARIS, MORE, FINAL):
        more = f"{before}{one}{AND}{more}{CALL_ENDS}"
        assert _follows(made, free[True], _ids(more))
        assert not _follows(made, free[False], _ids(more))


@pytest.mark.parametrize("before", ["", THOUGHT, f"{FINAL}{AND}"])
@pytest.mark.parametrize(
    "bad",
    [
        call("other", "{}"),
        call("no header's", "{}"),
        call("get", '{"city": "Paris"}'),
        called("get", '{"city": "Paris", "days": "3"}'),
        call("get.more", "[]"),
        call("get", '{"city": "a<|end|>b", "days": 3}'),
        call("get", "{}", "<|channel|>final"),
        PARIS.replace("<|constrain|>", ""),
        "<|channel|>other<|message|>hello",
    ],
)
def test_a_started_call_must_be_valid(
    made: GrammarCompilers, free: Mapping[bool, GuidedDecoding], before: str, bad: str
) -> None:
    for guide in free.values():
        assert not _ends(made, guide, before + bad)


def test_spelled_markers_are_text(
    made: GrammarCompilers, calls: Mapping[bool, GuidedDecoding]
) -> None:
    assert not _follows(made, calls[True], [*PARIS.encode(), TOKENS[CALL_ENDS]])
    spelt = [*b"<|end|><|start|>assistant<|channel|>final<|message|>"]
    thought = _ids("<|channel|>analysis<|message|>")
    rest = _ids(f"<|end|><|start|>assistant{PARIS}{CALL_ENDS}")
    assert _follows(made, calls[True], thought + spelt + rest)


def test_reasoning_ends_only_with_its_marker(
    made: GrammarCompilers, calls: Mapping[bool, GuidedDecoding]
) -> None:
    matcher = xgrammar.GrammarMatcher(made.compiled(prepared(calls[True])))
    for token in _ids("<|channel|>analysis<|message|>hm"):
        assert matcher.accept_token(token)
    mask = _mask(matcher)
    assert [marker for marker in MARKERS if allows(mask, TOKENS[marker])] == ["<|end|>"]


def test_a_call_that_follows_the_grammar_is_parsed(made: GrammarCompilers) -> None:
    listener = StreamParser(lambda: ModelFormat("harmony", "harmony").parser("", {}, reasons=True))
    answer = f"{THOUGHT}{PARIS}<|end|><|start|>assistant{MORE}{CALL_ENDS}"
    heard = listener.parse(answer, last=True)
    assert [part.name for part in heard.calls] == ["get", "get.more"]
    assert json.loads(heard.calls[0].arguments) == {"city": "Paris", "days": 3}
    assert (heard.content, heard.reasoning) == ("", "hm,\n\t<b> {ü}")


@pytest.mark.parametrize(
    "guide, good, bad",
    [
        (
            GuidedDecoding("json_schema", json.dumps(SCHEMA)),
            ('{"city": "Paris", "days": 3}',),
            ("{}", '{"city": "Paris", "days": 3} so', '{"city": "a\nb", "days": 3}', "hello"),
        ),
        (
            GuidedDecoding("json_object", ""),
            ("{}", '{"a": [1.5, null, "ü"]}'),
            ("[]", "1", "{", '{"a\n":1}'),
        ),
        (GuidedDecoding("regex", "[0-9]{2}"), ("27",), ("2", "271", "ab")),
        (GuidedDecoding("ebnf", 'root ::= "yes" | "no"'), ("yes", "no"), ("perhaps",)),
    ],
    ids=lambda value: value.kind if isinstance(value, GuidedDecoding) else None,
)
def test_the_final_channel_follows_a_schema(
    made: GrammarCompilers, guide: GuidedDecoding, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    """Seen failing with a compiler that caches rules of other grammars."""
    form = as_form(guide)
    assert form is not None
    held = tag(Channels(TOKENS).final(form))
    header = "<|channel|>final<|message|>"
    more = f"<|end|><|start|>assistant{header}hello"
    for thought in ("", THOUGHT):
        for text in good:
            assert _ends(made, held, thought + header + text) == ENDS, text
            assert not _ends(made, held, thought + text)
            assert not _ends(made, held, f"{thought}<|channel|>commentary<|message|>{text}")
            assert not _ends(made, held, thought + header + text + more)
        for text in bad:
            assert not _ends(made, held, thought + header + text), text


def test_a_grammar_without_rules_of_its_own_is_invalid() -> None:
    assert as_form(GuidedDecoding("structural_tag", "{}")) is None
    assert as_form(GuidedDecoding("json_schema", '{}, "type": "regex"')) is None
    assert as_form(GuidedDecoding("json_schema", "[" * 100_000)) is None


def test_a_response_follows_its_schema_in_the_final_channel_or_has_calls(
    made: GrammarCompilers,
) -> None:
    """Seen failing: with a schema no tool could be called."""
    form = as_form(GuidedDecoding("regex", "[0-9]+"))
    assert form is not None
    guide = tag(Channels(TOKENS).calls_or(form, [("get", SCHEMA)], parallel=False))
    final = "<|channel|>final<|message|>"
    for answer in (PARIS, THOUGHT + PARIS, f"{final}42", f"{THOUGHT}{final}42"):
        assert _follows(made, guide, _ids(answer + CALL_ENDS)), answer
    for answer in ("", f"{final}hello", THOUGHT, PARIS + final + "42", call("get", "{}")):
        assert not _follows(made, guide, _ids(answer + CALL_ENDS)), answer
