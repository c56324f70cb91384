"""Structural tags: free text, in which what has begun cannot be malformed, and what is no tag."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from common.engine.features.compilers import Compilers, prepared
from common.errors import InvalidRequest
from common.requests.guide import Guide
from router.parsers.listener import Listener
from router.parsers.speech import Speech
from tests.support.noise_model import SPECIAL_TOKENS, write

VOCABULARY = 256 + len(SPECIAL_TOKENS)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer"},
        "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["city", "days"],
}
TOOLS = [("get", SCHEMA), ("get_more", {"type": "object"})]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Compilers:
    directory: Path = tmp_path_factory.mktemp("tags") / "model"
    write(directory)
    return Compilers.of_model(directory, VOCABULARY, (VOCABULARY - 1,))


def _guide(wanted: Mapping[str, Any]) -> Guide:
    return Guide("structural_tag", json.dumps({"type": "structural_tag", "format": wanted}))


def _follows(made: Compilers, guide: Guide, text: str) -> bool:
    """Whether an answer can be that text."""
    matcher = xgrammar.GrammarMatcher(made.compiled(prepared(guide)))
    return matcher.accept_string(text) and matcher.is_completed()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, *arguments: tuple[str, str]) -> str:
    told = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str]) -> str:
    told = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments
    )
    return f"<tool_call>{name}\n{told}</tool_call>"


PARIS, DAYS, WHERE = ("city", "Paris"), ("days", "3"), ("where", '{"x": 1.5}')
CALLS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "hermes": (
        [
            hermes("get", '{"city": "Paris", "days": 3}'),
            hermes("get", '{"city": "a\\u0301", "days": 3, "where": {"x": 1.5}}').replace(
                "a\\u0301", "a é"
            ),
            hermes("get_more", '{"a": [1, "b"], "c": null}'),
        ],
        [
            hermes("get", '{"city": "Paris"}'),
            hermes("get", '{"city": "London", "days": 3}'),
            hermes("get", '{"city": "a\tb", "days": 3}'),
            hermes("get", '{"city": "Paris", "days": "3"}'),
            hermes("other", "{}"),
            hermes("get_more", "[]"),
            hermes("get_more", '{"a": "b\nc"}'),
            "<tool_call> nothing",
        ],
    ),
    "qwen3-coder": (
        [coder("get", PARIS, DAYS), coder("get", PARIS, DAYS, WHERE), coder("get_more")],
        [
            coder("get", PARIS),
            coder("get", ("city", "London"), DAYS),
            coder("get", PARIS, ("days", "three")),
            coder("get", PARIS, DAYS, ("where", "{}")),
            coder("other"),
            "<tool_call>\n<function=get>\n</function>\n</tool_call>",
        ],
    ),
    "glm45": (
        [
            glm("get", PARIS, DAYS),
            glm("get", PARIS, DAYS, WHERE),
            glm("get_more", PARIS),
            "<tool_call>get_more</tool_call>",
        ],
        [
            glm("get", PARIS),
            glm("get", PARIS, ("days", "three")),
            glm("get", PARIS, DAYS, ("where", "{}")),
            glm("other", PARIS),
            "<tool_call>gettysburg",
        ],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_has_begun_can_only_be_a_good_one(made: Compilers, name: str) -> None:
    """Which the parser finds, too."""
    speech = Speech(tools=name)
    form = speech.form_of_calls(TOOLS, parallel=True)
    assert form is not None
    guide = _guide(form)
    good, bad = CALLS[name]
    for text in ("", "1 < 2\n\tand <tool", f"Let me see.\n{good[0]}\n{good[1]} so", *good):
        assert _follows(made, guide, text), text
    for text in bad:
        assert not _follows(made, guide, text), text
    for text in good:
        listener = Listener(speech.parser("", dict(TOOLS), reasons=True))
        heard = listener.hear(text, last=True)
        (call,) = heard.calls
        assert not heard.content and call.name in text
        assert isinstance(json.loads(call.arguments), dict)
    alone = speech.form_of_calls(TOOLS, parallel=False)
    assert alone is not None
    assert _follows(made, _guide(alone), f"so {good[0]}")
    assert not _follows(made, _guide(alone), good[0] + good[1])


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    "text, good, bad",
    [
        (
            {"format": {"type": "tag", "begin": "<a>", "content": NUMBER, "end": "</a>"}},
            "<a>12</a>",
            "12",
        ),
        (
            {
                "triggers": ["<"],
                "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
            },
            "x\n<a>1</a>y",
            "x<b>",
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "regex", "pattern": "[ab]+"},
                        {
                            "type": "or",
                            "elements": [{"type": "const_string", "value": "!"}, NUMBER],
                        },
                    ],
                }
            },
            "ab!",
            "ab?",
        ),
        (
            {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "at_least_one": True,
                    "tags": [{"begin": "(", "content": NUMBER, "end": ")"}],
                }
            },
            "(1), (2)",
            "(1)(2)",
        ),
    ],
    ids=["format", "structures", "sequence", "separator"],
)
def test_a_tag_is_written_in_either_form(
    made: Compilers, text: dict[str, Any], good: str, bad: str
) -> None:
    guide = Guide("structural_tag", json.dumps({"type": "structural_tag", **text}))
    assert _follows(made, guide, good) and not _follows(made, guide, bad)


@pytest.mark.parametrize(
    "wanted, said",
    [
        ({"type": "nonsense"}, "format: type 'nonsense' is not known"),
        ({"type": "token", "token": "a"}, "format.token is no token's number"),
        ({"type": "token", "token": 10**6}, "out of the vocabulary range"),
        (
            {
                "type": "tag",
                "begin": {"type": "token", "token": 5},
                "content": {"type": "any_text"},
                "end": "a",
            },
            "any_text cannot stand beside tokens",
        ),
        ({"type": "regex", "pattern": r"a\b"}, "format.pattern: "),
        ({"type": "regex", "pattern": "a", "flags": 1}, "format: a regex has no 'flags'"),
        (
            {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"not": {}}}]},
            "format.elements[0].json_schema: #: not cannot be enforced",
        ),
        ({"type": "json_schema", "json_schema": {}, "style": "yaml"}, "format.style is none of"),
        ({"type": "sequence", "elements": 5}, "format.elements is no list"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": 5}, "format.tags is no list"),
        ({"type": "tag", "begin": "a", "content": {"type": "any_text"}}, "end"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_tag_is_refused_with_its_place(
    made: Compilers, wanted: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.structural_tag: ") as caught:
        made.compiled(prepared(_guide(wanted)))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "grammar, word",
    [
        ('root ::= "a" Token(65)', "Token"),
        ('root ::= "\\"Token(1)" ["] Token (65) "]"', "Token"),
        ('root ::= "a" ExcludeToken(65)', "ExcludeToken"),
        ('root ::= TokenTagDispatch((65, b))\nb ::= "b"', "TokenTagDispatch"),
        ('root ::= "a" b\nb ::= "b" (=Token(65))', "Token"),
    ],
)
def test_a_grammar_names_no_tokens(made: Compilers, grammar: str, word: str) -> None:
    """Seen failing with what xgrammar keeps of such rules: the mask of the first that was asked for
    came for all others."""
    for guide in (
        Guide("ebnf", grammar),
        _guide({"type": "grammar", "grammar": grammar}),
        _guide({"type": "optional", "content": {"type": "grammar", "grammar": grammar}}),
    ):
        with pytest.raises(InvalidRequest, match=f": {word} is refused"):
            made.compiled(prepared(guide))


def test_words_for_tokens_are_text_within_texts(made: Compilers) -> None:
    for grammar in ('root ::= "Token(65)"', 'root ::= "Token" [T(] "65" [")] # Token(1)'):
        guide = Guide("ebnf", grammar)
        assert _follows(made, guide, "Token(65)")


def test_beside_tokens_a_grammar_has_no_free_text_either(made: Compilers) -> None:
    grammar = {"type": "grammar", "grammar": 'root ::= TagDispatch(("a", b))\nb ::= "b"'}
    assert _follows(made, _guide(grammar), "xab")
    beside = [{"type": "token", "token": 65}, grammar]
    with pytest.raises(InvalidRequest, match=": TagDispatch is refused"):
        made.compiled(prepared(_guide({"type": "sequence", "elements": beside})))


def test_a_structure_that_is_none_is_refused_and_not_left_out(made: Compilers) -> None:
    text = '{"structures": [5], "triggers": ["<"]}'
    with pytest.raises(InvalidRequest, match=r"structures\[0\] is no object"):
        made.compiled(prepared(Guide("structural_tag", text)))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": {}, "tags": []}', "[" * 100_000])
def test_what_is_no_json_object_with_a_format_is_refused(made: Compilers, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.structural_tag: "):
        made.compiled(prepared(Guide("structural_tag", text)))
