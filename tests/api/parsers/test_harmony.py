"""A model with the harmony format under constraints of calls and schemas: its channels and
reasoning."""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from api.parsers.harmony import ENDS, MARKERS
from tests.api.models import calling_model
from tests.api.rig import CHAT, COMPLETIONS, HELLO, Api, api_for, collect, tool
from tests.support.network.http_client import Response

TEMPLATE = """{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>
final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD, SUB = tool("add", parameters=PARAMETERS), tool("sub")
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def call(name: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + arguments


_ADD, _SUB = call("add", '{"a": 27}'), call("sub", "{}")
CALLS = f"{THOUGHT}{_ADD}<|end|><|start|>assistant{_SUB}<|call|>"
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_model(tmp_path_factory.mktemp("harmony"), TEMPLATE, (*MARKERS, *ENDS))


async def _shape_of(talking: Api, **fields: Any) -> str:
    """Return the grammar of the response to a conversation, similar to a regex."""
    guide = await talking.guide_of(CHAT, messages=HELLO, **fields)
    return _shape(json.loads(guide.structural_tag)["format"], talking)


def _said(answer: Response, stream: bool) -> tuple[list[Any], list[Any]]:
    """Return the choices of a response, or of its events, and the messages or parts of one of
    them."""
    if stream:
        choices = [event["choices"][0] for event in answer.events]
        return choices, [one["delta"] for one in choices]
    choices = answer.json["choices"]
    return choices, [choices[0]["message"]]


def _joined(messages: list[Any], field: str) -> str:
    return "".join(one.get(field) or "" for one in messages)


def _shape(form: Mapping[str, Any], talking: Api) -> str:
    """Return a tag's grammar, similar to a regex, with tokens in their spelling."""
    match form:
        case {"type": "sequence", "elements": elements}:
            return "".join(_shape(each, talking) for each in elements)
        case {"type": "or", "elements": elements}:
            return f"({'|'.join(_shape(each, talking) for each in elements)})"
        case {"type": "optional", "content": content}:
            return f"({_shape(content, talking)})?"
        case {"type": "star", "content": content}:
            return f"({_shape(content, talking)})*"
        case {"type": "token", "token": token}:
            return talking.text([token])
        case {"type": "const_string", "value": value}:
            return str(value)
        case {"type": "regex", "pattern": pattern}:
            return f"/{pattern}/"
        case {"type": "json_schema", "json_schema": schema}:
            return json.dumps(schema)
        case {"type": "grammar", "grammar": grammar}:
            return f"`{grammar}`"
        case _:
            raise AssertionError(form)


MAY_THINK = r"(<|channel|>analysis<|message|>/[\s\S]*/<|end|><|start|>assistant)?"


def _call_shape(name: str, schema: str) -> str:
    header = (
        f"<|channel|>commentary to=functions.{name} | to=functions.{name}<|channel|>commentary "
    )
    return f"({header})<|constrain|>json<|message|>{schema}"


ADD_SHAPE = _call_shape("add", json.dumps(PARAMETERS))
SUB_SHAPE = _call_shape("sub", '{"type": "object"}')
FREE_ADD_SHAPE = _call_shape("add", '{"type": "object"}')
CALL_SHAPES = (
    f"({FREE_ADD_SHAPE}|{SUB_SHAPE})(<|end|><|start|>assistant({FREE_ADD_SHAPE}|{SUB_SHAPE}))*"
)
FINAL = "<|channel|>final<|message|>"
SAID = r"<|channel|>(analysis|commentary|final)<|message|>/[\s\S]*/"


@pytest.mark.parametrize(
    "fields, shape",
    [
        (
            {"tool_choice": "required"},
            f"{MAY_THINK}({ADD_SHAPE}|{SUB_SHAPE})"
            f"(<|end|><|start|>assistant({ADD_SHAPE}|{SUB_SHAPE}))*",
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            f"{MAY_THINK}({ADD_SHAPE}|{SUB_SHAPE})",
        ),
        ({"tool_choice": tool("sub")}, f"{MAY_THINK}{SUB_SHAPE}"),
        ({"response_format": FORMAT}, f"{MAY_THINK}({FINAL}{json.dumps(SCHEMA)}|{CALL_SHAPES})"),
        (
            {"response_format": {"type": "json_object"}},
            f'{MAY_THINK}({FINAL}{{"type": "object"}}|{CALL_SHAPES})',
        ),
        (
            {"response_format": FORMAT, "parallel_tool_calls": False},
            f"{MAY_THINK}({FINAL}{json.dumps(SCHEMA)}|({FREE_ADD_SHAPE}|{SUB_SHAPE}))",
        ),
        ({"guided_regex": "a+"}, f"{MAY_THINK}({FINAL}/a+/|{CALL_SHAPES})"),
        ({"guided_choice": ["a", "b"]}, f'{MAY_THINK}({FINAL}`root ::= "a" | "b"`|{CALL_SHAPES})'),
        ({"guided_regex": "a+", "tool_choice": "none"}, f"{MAY_THINK}{FINAL}/a+/"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
async def test_a_response_is_constrained_to_its_channels(talking, fields, shape):
    assert await _shape_of(talking, tools=[ADD, SUB], **fields) == shape


@STREAM
async def test_required_calls_are_parsed_behind_the_reasoning(talking, stream):
    fields = {"tools": [ADD, SUB], "tool_choice": "required", "stream": stream}
    asked = talking.post(CHAT, messages=HELLO, **fields)
    _, answer = await talking.say_one_by_one(CALLS, asked)
    choices, said = _said(answer, stream)
    parts = [part["function"] for one in said for part in one.get("tool_calls") or ()]
    assert [part["name"] for part in parts if part.get("name")] == ["add", "sub"]
    assert "".join(part.get("arguments") or "" for part in parts) == '{"a": 27}{}'
    assert (_joined(said, "content"), _joined(said, "reasoning_content")) == ("", "hm")
    assert choices[-1]["finish_reason"] == "tool_calls"


@STREAM
async def test_markers_spelt_with_other_tokens_are_text(talking, stream):
    spelt = "".join((*MARKERS, *ENDS))
    quoted = json.dumps({"q": spelt})
    fields = {"stop": ["sure~", "|>h!"], "logprobs": True, "max_tokens": 1000}

    def spell(text: str) -> list[int]:
        return [token for character in text for token in talking.ids(character)]

    tokens = [
        *talking.ids("<|channel|>analysis<|message|>"),
        *spell(f"is {spelt} what?"),
        *talking.ids("<|end|><|start|>assistant<|channel|>commentary to=functions.add "),
        *talking.ids("<|constrain|>json<|message|>"),
        *spell(quoted),
        *talking.ids("<|end|><|start|>assistant<|channel|>final<|message|>"),
        *spell(f"h: {spelt} is, for sure~ it is"),
    ]
    asking = asyncio.create_task(
        talking.post(CHAT, messages=HELLO, tools=[ADD], stream=stream, **fields)
    )
    number = (await talking.node.submitted()).number
    for token in tokens:
        talking.node.say({number: [token]}, logprobs={number: [-0.5]})
    choices, said = _said(await asking, stream)
    (call,) = [each for one in said for each in one.get("tool_calls") or () if each.get("id")]
    parts = [each["function"] for one in said for each in one.get("tool_calls") or ()]
    assert call["function"]["name"] == "add"
    assert "".join(part.get("arguments") or "" for part in parts) == quoted
    assert _joined(said, "content") == f"h: {spelt} is, for "
    assert _joined(said, "reasoning_content") == f"is {spelt} what?"
    reported = [each for one in choices if one["logprobs"] for each in one["logprobs"]["content"]]
    assert len(reported) == len(tokens) - len(" it is")
    assert choices[-1]["stop_reason"] == "sure~"


async def test_a_schema_applies_to_the_content_and_not_to_the_reasoning(talking):
    text = f'{THOUGHT}<|channel|>final<|message|>{{"sum": 42}}<|return|>'
    choice, prompt = await talking.chat(text, response_format=FORMAT)
    assert prompt.endswith("<|start|>assistant")
    assert choice.message.content == '{"sum": 42}'
    assert choice.message.reasoning_content == "hm"


@pytest.mark.parametrize(
    "tools, fields, shape",
    [
        (
            [SUB],
            {},
            f"(/[\\s\\S]*/|({SAID}|{ADD_SHAPE}|{SUB_SHAPE}))"
            f"(<|end|><|start|>assistant({SAID}|{ADD_SHAPE}|{SUB_SHAPE}))*",
        ),
        (
            [],
            {"parallel_tool_calls": False},
            f"((/[\\s\\S]*/|{SAID})(<|end|><|start|>assistant{SAID})*"
            f"(<|end|><|start|>assistant{ADD_SHAPE})?|{ADD_SHAPE})",
        ),
    ],
    ids=["beside another", "no more than one call"],
)
async def test_calls_of_strict_tools_follow_their_schema(talking, tools, fields, shape):
    """Tools whose name no header can contain have no grammar."""
    strict = tool("add", parameters=PARAMETERS, strict=True)
    assert await _shape_of(talking, tools=[strict, tool("a b"), *tools], **fields) == shape


async def test_optional_calls_are_unconstrained_if_the_router_is_configured_so(calling):
    async with api_for(calling, tool_arguments="free") as talking:
        for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
            submit, _ = await talking.ask(CHAT, messages=HELLO, tools=[ADD], **fields)
            assert not submit.sampling.HasField("guide")
        choice, _ = await talking.chat(CALLS, tools=[ADD, SUB])
        assert [each.function.name for each in choice.message.tool_calls] == ["add", "sub"]


async def test_a_response_without_a_header_is_constrained_from_its_start(talking):
    """This applies to a prompt without a template, to a continued turn, and to a structural tag,
    which itself defines where text is free."""
    said = [*HELLO, {"role": "assistant", "content": "{"}]
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    for path, fields in (
        (COMPLETIONS, {"prompt": "x", "response_format": FORMAT}),
        (CHAT, {"messages": said, "continue_final_message": True, "response_format": FORMAT}),
        (CHAT, {"messages": HELLO, "response_format": tag}),
    ):
        guide = await talking.guide_of(path, **fields)
        wanted = tag if fields["response_format"] is tag else SCHEMA
        assert json.loads(getattr(guide, guide.WhichOneof("form"))) == wanted


async def test_a_required_call_with_a_name_that_no_header_can_contain_is_rejected(talking):
    odd = tool("a b")
    for choice in ("required", odd):
        answer = await talking.post(CHAT, messages=HELLO, tools=[ADD, odd], tool_choice=choice)
        assert (answer.status, answer.error["param"]) == (400, "tool_choice")
        assert "does not allow the name 'a b'" in answer.error["message"]


async def test_markers_that_are_text_constrain_nothing_so_calls_are_json(tmp_path):
    fields = {"messages": HELLO, "tools": [SUB], "tool_choice": "required"}
    async with api_for(calling_model(tmp_path, TEMPLATE, markers=())) as talking:
        submit, answer = await talking.ask(CHAT, '[{"name": "sub", "parameters": {}}]', **fields)
        assert json.loads(submit.sampling.guide.json_schema)["type"] == "array"
        (choice,) = answer.json["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "sub"


async def test_over_grpc_a_schema_applies_to_the_content_too(talking):
    asked = talking.grpc.chat(sampling={"guide": {"regex": "[0-9]+"}})
    submit = await talking.complete(f"{THOUGHT}<|channel|>final<|message|>42<|return|>")
    form = json.loads(submit.sampling.guide.structural_tag)["format"]
    assert re.search(r"final<\|message\|>/\[0-9\]\+/$", _shape(form, talking))
    text, _, last = await collect(asked)
    assert (text, last.reasoning) == ("42", "hm")
