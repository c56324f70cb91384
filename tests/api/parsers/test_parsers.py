"""Parsers separate the parts of model output, however it is cut into pieces."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from msgspec.structs import replace

from api.parsers.formats import DEEPSEEK
from api.parsers.model_format import NONE, ModelFormat, detect_format
from api.parsers.source import StreamParser

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "unit": {"enum": ["C", 7]},
            "where": {"$ref": "#/$defs/where"},
            "note": {"type": ["string", "null"]},
        },
        "$defs": {"where": {"anyOf": [{"$ref": "#/$defs/where"}, {"type": "object"}]}},
    },
    "get_weather": {},
}
PARIS = '{"city": "Paris"}'
TRICKY = '{"q": "a } \\" ] [TOOL_CALLS] </tool_call> {", "n": [1, {"x": null}]}'
BEGINS, BEGIN, SEP, END, CALLS_END = DEEPSEEK


@dataclass(frozen=True)
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = field(default_factory=list)


def listened(
    model_format: ModelFormat,
    pieces: Sequence[str],
    end: str = "",
    tools: Mapping[str, Any] | None = TOOLS,
    reasons: bool = True,
    parallel: bool = True,
    marks: Sequence[int] = (),
) -> Parsed:
    """Args:
    marks: positions of special tokens in the whole text.
    """
    parser = StreamParser(
        lambda: model_format.parser(end, tools, reasons=reasons), parallel=parallel
    )
    content = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    ids: dict[int, str] = {}
    begun = 0
    for number, piece in enumerate(pieces, start=1):
        here = [mark - begun for mark in marks if 0 <= mark - begun < len(piece)]
        begun += len(piece)
        parsed = parser.parse(piece, here, last=number == len(pieces))
        content += parsed.content
        reasoning += parsed.reasoning
        for part in parsed.calls:
            name, arguments = calls.get(part.index, ("", ""))
            assert bool(part.id) == bool(part.name) == (part.index not in ids)
            ids.setdefault(part.index, part.id)
            calls[part.index] = (name + part.name, arguments + part.arguments)
    assert list(calls) == list(range(len(calls)))
    assert len(set(ids.values())) == len(ids)
    return Parsed(content, reasoning, [calls[index] for index in sorted(calls)])


HERMES, LLAMA3 = ModelFormat(tools="hermes"), ModelFormat(tools="llama3")
MISTRAL, DEEPSEEKS = ModelFormat(tools="mistral"), ModelFormat(tools="deepseek")
QWEN3, R1 = ModelFormat("qwen3", "hermes"), ModelFormat("deepseek-r1", "deepseek")
CODER, GLM = ModelFormat(tools="qwen3-coder"), ModelFormat("qwen3", "glm45")
HARMONY = ModelFormat("harmony", "harmony")


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def of_v3(arguments: str, name: str = "f") -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def coder(arguments: Mapping[str, str], name: str = "f") -> str:
    parameters = "".join(
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(arguments: Mapping[str, str], name: str = "f") -> str:
    parameters = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
        for key, text in arguments.items()
    )
    return f"<tool_call>{name}\n{parameters}</tool_call>"


WRITTEN = {
    "city": ' "a" </tool_call>\n\n',
    "days": "3",
    "exact": "True",
    "unit": "C",
    "where": '{"x": [1.5, null]}',
    "note": "null",
    "other": "[1]",
}
TYPED = (
    r'{"city": " \"a\" </tool_call>\n\n", "days": 3, "exact": true, "unit": "C", '
    r'"where": {"x": [1.5, null]}, "note": null, "other": [1]}'
)
MISTYPED = {"days": "x3", "exact": "0", "where": "[]", "note": "3", "unit": "7", "city": "7"}
AS_TEXT = '{"days": "x3", "exact": "0", "where": "[]", "note": "3", "unit": 7, "city": "7"}'

CASES: dict[str, tuple[ModelFormat, str, Parsed]] = {
    "plain text": (ModelFormat(), " hello <tool_call>\n ", Parsed(" hello <tool_call>\n ")),
    "no call": (HERMES, "1 < 2 <tool_cal ", Parsed("1 < 2 <tool_cal ")),
    "hermes": (HERMES, hermes(PARIS), Parsed(calls=[("f", PARIS)])),
    "hermes, tricky": (HERMES, hermes(TRICKY), Parsed(calls=[("f", TRICKY)])),
    "hermes, two and words": (
        HERMES,
        f"Let me see. \n\n{hermes(PARIS)}\n{hermes('{}', 'get_weather')}\n",
        Parsed("Let me see.", calls=[("f", PARIS), ("get_weather", "{}")]),
    ),
    "hermes, keys in another order": (
        HERMES,
        f'<tool_call>{{"id": [1, "}}"], "arguments": {PARIS}, "name": "f"}}</tool_call>bye',
        Parsed("bye", calls=[("f", PARIS)]),
    ),
    "hermes, arguments as a text": (
        HERMES,
        hermes(json.dumps(PARIS)),
        Parsed(calls=[("f", PARIS)]),
    ),
    "hermes, without arguments": (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": null}',
        Parsed(calls=[("f", "{}"), ("f", "{}")]),
    ),
    "hermes, never closed": (
        HERMES,
        f'<tool_call>{{"name": "f", "arguments": {PARIS}}}\n{hermes("{}")}',
        Parsed(calls=[("f", PARIS), ("f", "{}")]),
    ),
    "hermes, no JSON": (
        HERMES,
        "see <tool_call>nothing</tool_call> there",
        Parsed("see <tool_call>nothing</tool_call> there"),
    ),
    "hermes, cut off": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        Parsed(calls=[("f", '{"a": "b')]),
    ),
    "hermes, an escaped name": (
        HERMES,
        '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>',
        Parsed(calls=[("café", "{}")]),
    ),
    "llama3": (
        LLAMA3,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        Parsed(calls=[("get_weather", PARIS)]),
    ),
    "llama3, behind a tag": (
        LLAMA3,
        f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {PARIS}}}',
        Parsed(calls=[("f", PARIS)]),
    ),
    "llama3, two": (
        LLAMA3,
        f'{{"name": "f", "parameters": {{}}}}; {{"name": "f", "parameters": {TRICKY}}}\n',
        Parsed(calls=[("f", "{}"), ("f", TRICKY)]),
    ),
    "llama3, other JSON": (
        LLAMA3,
        ' {"answer": {"name": "f"}}',
        Parsed(' {"answer": {"name": "f"}}'),
    ),
    "llama3, an unknown tool": (
        LLAMA3,
        '{"name": "Ada", "parameters": {}} is who',
        Parsed('{"name": "Ada", "parameters": {}} is who'),
    ),
    "llama3, words": (LLAMA3, "Hello {you}", Parsed("Hello {you}")),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {TRICKY}}}, '
        f'{{"name": "get_weather", "arguments": {PARIS}}}]',
        Parsed(calls=[("f", TRICKY), ("get_weather", PARIS)]),
    ),
    "mistral, newer": (
        MISTRAL,
        f"so [TOOL_CALLS]f[ARGS]{PARIS}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{{}}",
        Parsed("so", calls=[("f", PARIS), ("get_weather", "{}")]),
    ),
    "mistral, newest": (MISTRAL, f"[TOOL_CALLS]f{PARIS}", Parsed(calls=[("f", PARIS)])),
    "mistral, words": (MISTRAL, "[TOOL] x", Parsed("[TOOL] x")),
    "deepseek v3": (
        DEEPSEEKS,
        f"Well.{BEGINS}{of_v3(PARIS)}\n{of_v3('{}', 'get_weather')}{CALLS_END}",
        Parsed("Well.", calls=[("f", PARIS), ("get_weather", "{}")]),
    ),
    "deepseek v3.1": (
        DEEPSEEKS,
        f"{BEGINS}{BEGIN}f{SEP}{TRICKY}{END}{BEGIN}get_weather{SEP}{PARIS}{END}{CALLS_END}",
        Parsed(calls=[("f", TRICKY), ("get_weather", PARIS)]),
    ),
    "deepseek, cut off": (DEEPSEEKS, f"{BEGINS}{BEGIN}function{SEP}get_w", Parsed()),
    "qwen3": (
        QWEN3,
        f"<think>\nhm, <tool_call> </thin\n</think>\n\nSo: {hermes(PARIS)}",
        Parsed("So:", "hm, <tool_call> </thin", [("f", PARIS)]),
    ),
    "qwen3, without a thought": (QWEN3, "\n a <think> b", Parsed("\n a <think> b")),
    "qwen3, an empty thought": (QWEN3, "<think>\n\n</think>\n\nhi", Parsed("hi")),
    "qwen3, cut off": (QWEN3, "<think>\nhm\n", Parsed("", "hm\n")),
    "r1": (R1, "hm\n</think>\n\nhi", Parsed("hi", "hm")),
    "r1, opened": (
        R1,
        f"<think>\nhm\n</think>\n{BEGINS}{of_v3(PARIS)}{CALLS_END}",
        Parsed("", "hm", [("f", PARIS)]),
    ),
    "qwen3-coder": (
        CODER,
        f"Let me see.\n\n{coder(WRITTEN)}\n{coder({}, 'get_weather')}\n",
        Parsed("Let me see.", calls=[("f", TYPED), ("get_weather", "{}")]),
    ),
    "qwen3-coder, other types": (CODER, coder(MISTYPED), Parsed(calls=[("f", AS_TEXT)])),
    "qwen3-coder, no first marker": (
        CODER,
        "so <function=f>\n<parameter=city>Paris</parameter></function></tool_call>bye",
        Parsed("sobye", calls=[("f", PARIS)]),
    ),
    "qwen3-coder, no call": (
        CODER,
        "x <tool_call>{} <function=g> y<function",
        Parsed("x <tool_call>{} <function=g> y<function"),
    ),
    "qwen3-coder, a text cut off": (
        CODER,
        coder(WRITTEN)[: coder(WRITTEN).index("</tool_call>")],
        Parsed(calls=[("f", r'{"city": " \"a\" ')]),
    ),
    "qwen3-coder, a number cut off": (
        CODER,
        "<tool_call><function=f><parameter=days>\n3",
        Parsed(calls=[("f", '{"days": ')]),
    ),
    "glm45": (
        GLM,
        f"<think>hm</think>\nWell.\n{glm(WRITTEN)}\n{glm({}, 'get_weather')}",
        Parsed("Well.", "hm", [("f", TYPED), ("get_weather", "{}")]),
    ),
    "glm47": (GLM, glm({"city": "Paris"}).replace("\n", ""), Parsed(calls=[("f", PARIS)])),
    "glm45, other types": (GLM, glm(MISTYPED), Parsed(calls=[("f", AS_TEXT)])),
    "glm45, no call": (GLM, "x <tool_call></tool_call>", Parsed("x <tool_call></tool_call>")),
    "glm45, cut off": (
        GLM,
        "<tool_call>f<arg_key>city</arg_key><arg_value>Pa",
        Parsed(calls=[("f", '{"city": "Pa')]),
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        "hi there<|return|>",
        Parsed("hi there", "hm"),
    ),
    "harmony, calls": (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{TRICKY}<|call|><|start|>assistant to=functions.get_weather"
        f"<|channel|>commentary json<|message|>{PARIS}<|call|>",
        Parsed("Let me see.", "hm", [("f", TRICKY), ("get_weather", PARIS)]),
    ),
    "harmony, cut off": (HARMONY, "<|channel|>final<|message|>hi <|en", Parsed("hi <|en")),
    "harmony, no harmony": (HARMONY, "hello", Parsed("hello")),
    "harmony, goes on": (
        HARMONY,
        "o to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>hi<|return|>",
        Parsed("o to=functions.fhi"),
    ),
    "harmony, half a header": (
        HARMONY,
        "<|channel|>final<|end|><|start|>assistant<|start|>assistant<|channel|>final<|message|>hi",
        Parsed("hi"),
    ),
    "harmony, cut off in a header": (
        HARMONY,
        "<|channel|>final<|message|>hi<|end|><|start|>assistant to",
        Parsed("hi"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_cuts(name):
    model_format, text, reported = CASES[name]
    for cut in range(len(text) + 1):
        assert listened(model_format, [text[:cut], text[cut:]]) == reported, text[:cut]
    for size in (1, 2, 3, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert listened(model_format, [*pieces, ""]) == reported, size


SPOKEN = {
    "hermes": replace(QWEN3, tokens=dict.fromkeys(QWEN3.markers(calls=True), 0)),
    "glm": replace(GLM, tokens=dict.fromkeys(GLM.markers(calls=True), 0)),
    "qwen3-coder": replace(CODER, tokens=dict.fromkeys(["<tool_call>", "</tool_call>"], 0)),
    "deepseek": replace(R1, tokens=dict.fromkeys(R1.markers(calls=True), 0)),
    "llama3": replace(LLAMA3, tokens={"<|python_tag|>": 0}),
    "mistral": replace(MISTRAL, tokens=dict.fromkeys(MISTRAL.markers(calls=True), 0)),
    "harmony": replace(HARMONY, tokens=dict.fromkeys(HARMONY.markers(calls=True), 0)),
}
ALL_SPELT = "".join(
    dict.fromkeys(each for model_format in SPOKEN.values() for each in model_format.tokens)
)
QUOTED = json.dumps({"q": ALL_SPELT}, ensure_ascii=False)
# Special tokens have a character before each. Everything else that is spelt like them is text.
WITH_TOKENS: dict[str, tuple[str, Parsed]] = {
    "hermes": (
        f"~<think>is it {ALL_SPELT}?~</think>Like {hermes('{}')}:\n"
        f'~<tool_call>{{"name": "f", "arguments": {QUOTED}}}~</tool_call>',
        Parsed(f"Like {hermes('{}')}:", f"is it {ALL_SPELT}?", [("f", QUOTED)]),
    ),
    "glm": (
        f"{glm({})}~<tool_call>f~<arg_key>city~</arg_key>"
        f"~<arg_value>{ALL_SPELT}~</arg_value>~</tool_call>",
        Parsed(glm({}), calls=[("f", QUOTED.replace('"q"', '"city"'))]),
    ),
    "qwen3-coder": (
        "<tool_call>f</tool_call>~<tool_call>\n<function=f>\n</function>\n~</tool_call>",
        Parsed("<tool_call>f</tool_call>", calls=[("f", "{}")]),
    ),
    "deepseek": (
        f"{ALL_SPELT}~</think>{ALL_SPELT}~{BEGINS}~{BEGIN}function~{SEP}f\n```json\n{QUOTED}\n```"
        f"~{END}~{BEGIN}f~{SEP}{QUOTED}~{END}~{CALLS_END}",
        Parsed(ALL_SPELT, ALL_SPELT, [("f", QUOTED), ("f", QUOTED)]),
    ),
    "llama3": (
        '<|python_tag|>{"name": "f", "parameters": {}}',
        Parsed('<|python_tag|>{"name": "f", "parameters": {}}'),
    ),
    "mistral": (
        f"Like [TOOL_CALLS]f[ARGS]{{}} ~[TOOL_CALLS]f~[CALL_ID]1[ARGS]~[ARGS]{QUOTED}",
        Parsed("Like [TOOL_CALLS]f[ARGS]{}", calls=[("f", QUOTED)]),
    ),
    "harmony": (
        f"~<|channel|>analysis~<|message|>{ALL_SPELT}~<|end|>~<|start|>assistant"
        f"~<|channel|>commentary to=functions.f ~<|constrain|>json~<|message|>{QUOTED}~<|end|>"
        f"~<|start|>assistant~<|channel|>final~<|message|>{ALL_SPELT}~<|return|>",
        Parsed(ALL_SPELT, ALL_SPELT, [("f", QUOTED)]),
    ),
}


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_the_spelling_of_a_special_token_is_no_marker(name):
    """Seen failing with markers found by their text alone."""
    written, reported = WITH_TOKENS[name]
    parts = written.split("~")
    text = "".join(parts)
    marks = list(accumulate(map(len, parts[:-1])))
    for size in (1, 2, 5, 8, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert listened(SPOKEN[name], [*pieces, ""], marks=marks) == reported, size


@pytest.mark.parametrize("name", CASES)
def test_if_all_markers_are_special_tokens_nothing_else_changes(name):
    model_format, text, reported = CASES[name]
    markers = [*model_format.markers(calls=True)]
    marks = [at for at in range(len(text)) if text.startswith(tuple(markers), at)]
    spoken = replace(model_format, tokens=dict.fromkeys(markers, 0))
    for size in (1, 7, len(text) or 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert listened(spoken, [*pieces, ""], marks=marks) == reported, size


def test_text_that_starts_like_a_special_token_is_not_held_back():
    parser = StreamParser(lambda: SPOKEN["hermes"].parser("", TOOLS, reasons=True))
    assert parser.parse("~ <tool", [], last=False).content == "~ <tool"


def test_parts_are_reported_before_the_rest_arrives():
    parser = StreamParser(lambda: QWEN3.parser("", TOOLS, reasons=True))
    assert parser.parse("<think>hm", last=False).reasoning == "hm"
    assert parser.parse("</think>So", last=False).content == "So"
    (begun,) = parser.parse('\n<tool_call>{"name": "f", "arg', last=False).calls
    assert (begun.name, begun.arguments) == ("f", "")
    (more,) = parser.parse('uments": {"city": "Pa', last=False).calls
    assert more.arguments == '{"city": "Pa'


@pytest.mark.parametrize(
    "end, text, reported",
    [
        ("[assistant]<think>\n", "hm</think>hi", Parsed("hi", "hm")),
        ("[assistant]<think>\n\n</think>\n\n", "hi </think>", Parsed("hi </think>")),
        ("what is <think>?[assistant]\n", "hi", Parsed("hi")),
    ],
)
def test_the_end_of_the_prompt_decides_whether_reasoning_has_begun(end, text, reported):
    assert listened(QWEN3, [text], end) == reported
    if "<think>?" not in end:
        assert listened(R1, [text], end) == reported


@pytest.mark.parametrize("model_format", [QWEN3, R1], ids=["qwen3", "r1"])
def test_reasoning_can_be_left_out(model_format):
    assert listened(model_format, ["<think>hm</th", "ink>hi"], reasons=False) == Parsed("hi")


def test_without_allowed_tools_a_call_is_text():
    assert listened(HERMES, [hermes("{}")], tools=None) == Parsed(hermes("{}"))
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert listened(HARMONY, [text], tools=None) == Parsed("{}")


def test_only_the_first_of_several_calls_is_reported_if_parallel_calls_are_disabled():
    text = hermes(PARIS) + hermes("{}")
    for pieces in ([text], list(text)):
        assert listened(HERMES, pieces, parallel=False).calls == [("f", PARIS)]


@pytest.mark.parametrize(
    "template, model_format",
    [
        ("{{ messages }}", ModelFormat()),
        ("<tool_call> <think> </think>", ModelFormat("qwen3", "hermes")),
        ("<tool_call>", ModelFormat(NONE, "hermes")),
        ("<tool_call> <function=", ModelFormat(NONE, "qwen3-coder")),
        ("</think> <tool_call> <arg_key>", ModelFormat("qwen3", "glm45")),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", ModelFormat(NONE, "mistral")),
        (f"{BEGINS} </think>", ModelFormat("qwen3", "deepseek")),
        ('<|start_header_id|> "parameters"', ModelFormat(NONE, "llama3")),
        ("<|start|>assistant<|channel|>", ModelFormat("harmony", "harmony")),
    ],
)
def test_the_format_of_a_model_is_detected_from_its_template(template, model_format):
    assert detect_format(template, "auto", "auto") == model_format
    assert detect_format(template, "none", "none") == ModelFormat()
    assert detect_format(template, "deepseek-r1", "hermes") == ModelFormat("deepseek-r1", "hermes")
