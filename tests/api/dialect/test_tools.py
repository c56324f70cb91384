"""Tools and reasoning with OpenAI's own client."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from jsonschema import Draft202012Validator

from api.dialect.messages import ToolDefinition, ToolFunction
from api.dialect.problems import ApiError
from api.dialect.tools import ToolOffer, guide_of_calls, guided, optional
from api.parsers.model_format import ModelFormat
from common.requests.sampling import SamplingParams
from engine.grammar.schemas.enforced import enforced
from protos import router_pb2
from protos.decode_pb2 import FINISH_REASON_LENGTH
from tests.api.models import CALL
from tests.api.rig import ABSENT, CHAT, HELLO, api_for, collect, fails, router_for, tool

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY = {"type": "object"}
ADD = {"description": "Adds <two> numbers.", "parameters": PARAMETERS}
TOOLS, STRICT = [tool("add", **ADD)], tool("add", **ADD, strict=True)
SAMPLING = SamplingParams(max_tokens=1, seed=0)


def _tool(said: dict[str, Any]) -> ToolDefinition:
    return ToolDefinition("function", ToolFunction(**said["function"]))


async def test_a_call_is_separated_from_text(talking):
    choice, prompt = await talking.chat(f"Let me see.\n{CALL}</s>", tools=TOOLS)
    assert '"name": "add", "description": "Adds <two> numbers."' in prompt
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert call.function.arguments == '{"a": 27, "b": 15}'
    assert len(call.id) == 9 and call.id.isalnum()
    choice, _ = await talking.chat(CALL, tools=TOOLS, tool_choice="auto")
    assert choice.message.content is None


async def test_a_conversation_continues_after_a_call(talking):
    choice, _ = await talking.chat(f"<think>hm</think>{CALL}", tools=TOOLS)
    call = choice.message.tool_calls[0]
    messages = [
        *HELLO,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "42"}]},
    ]
    choice, prompt = await talking.chat("It is 42.", tools=TOOLS, messages=messages)
    assert '{"name": "add", "arguments": {"a": 27, "b": 15}}' in prompt
    assert "<think>\nhm</think>" in prompt and f"({call.id})" in prompt
    assert (choice.message.content, choice.finish_reason) == ("It is 42.", "stop")
    assert choice.message.tool_calls is None


async def test_a_streamed_call_has_openais_pieces(talking):
    asking = asyncio.create_task(
        talking.client.chat.completions.create(
            model=talking.model, messages=HELLO, tools=TOOLS, stream=True
        )
    )
    number = (await talking.node.submitted()).number
    tokens = talking.ids(f"<think>hm\n</think>Well.\n{CALL}\n{CALL}</s>")
    node = talking.node
    node.say({number: tokens[:1]})
    chunks = [await anext(stream := await asking)]
    for token in tokens[1:-1]:
        node.say({number: [token]})
    node.finish(number, tokens[-1:])
    chunks += [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [choice.delta for choice in choices]
    assert [delta.role for delta in deltas].count("assistant") == 1
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    thought = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(thought) == "hm"
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    begun = [part for part in parts if part.id]
    assert [(part.index, part.type, part.function.name) for part in begun] == [
        (0, "function", "add"),
        (1, "function", "add"),
    ]
    for index in (0, 1):
        reported = [part.function.arguments or "" for part in parts if part.index == index]
        assert "".join(reported) == '{"a": 27, "b": 15}'
        assert len(reported) > 3
    assert [choice.finish_reason for choice in choices][-2:] == [None, "tool_calls"]


async def test_a_call_cut_off_by_the_length_limit_has_that_finish_reason(talking):
    choice, _ = await talking.chat(CALL[:45], reason=FINISH_REASON_LENGTH, tools=TOOLS)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"a"'


async def test_without_tools_no_text_is_parsed_as_a_call(talking):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, prompt = await talking.chat(CALL, **fields)
        assert "<tools>" not in prompt
        assert f"<tool_call>{choice.message.content}</tool_call>" == CALL


async def test_reasoning_is_separated_and_can_be_left_out(talking):
    choice, _ = await talking.chat("<think>\nhm\n</think>\n\nhi")
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "hi")
    choice, _ = await talking.chat("<think>hm</think>hi", extra_body={"include_reasoning": False})
    assert not hasattr(choice.message, "reasoning_content")
    assert choice.message.content == "hi"
    setting = {"chat_template_kwargs": {"enable_thinking": False}}
    choice, prompt = await talking.chat("hi </think>", extra_body=setting)
    assert prompt.endswith("<think></think>")
    assert choice.message.content == "hi </think>"


async def test_a_flag_selects_the_format_of_calls(calling):
    async with api_for(calling, tool_parser="mistral", reasoning_parser="none") as talking:
        text = '<think>[TOOL_CALLS][{"name": "add", "arguments": {}}]'
        choice, _ = await talking.chat(text, tools=TOOLS)
        assert choice.message.tool_calls[0].function.arguments == "{}"
    async with api_for(calling, tool_parser="none") as talking:
        assert await talking.refused(CHAT, messages=HELLO, tools=TOOLS) == (400, "tools")


WRONG = [
    ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "subtract"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "code": "x"}}]}, "tools[0]"),
    ({"tools": TOOLS * 1025}, "tools"),
    ({"tools": [{**TOOLS[0], "function": {"name": "x" * 70_000}}]}, "messages"),
    ({"chat_template_kwargs": {"enable_thought": 1}}, "chat_template_kwargs"),
]


async def test_invalid_tools_are_rejected_by_name(talking):
    for fields, param in WRONG:
        await talking.refuses(param, CHAT, messages=HELLO, **fields)


FORCED = '[{"name": "add", "parameters": {"a": 27}}, {"name": "sub", "parameters": {}}]'
SUB = tool("sub")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_with_a_required_call_has_only_calls(calling, stream):
    async with api_for(calling, tool_parser="none") as talking:
        fields = {"tools": [*TOOLS, SUB], "tool_choice": "required", "stream": stream}
        submit, answer = await talking.say_one_by_one(
            FORCED, talking.post(CHAT, messages=HELLO, **fields)
        )
    schema = json.loads(submit.sampling.guide.json_schema)
    calls = [call["properties"] for call in schema["items"]["anyOf"]]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert [call["name"]["enum"] for call in calls] == [["add"], ["sub"]]
    assert calls[0]["parameters"] == PARAMETERS
    if stream:
        choices = [event["choices"][0] for event in answer.events]
        parts = [part for one in choices for part in one["delta"].get("tool_calls", ())]
        reported = [
            "".join(part["function"].get("arguments", "") for part in parts if part["index"] == n)
            for n in (0, 1)
        ]
        assert not any(one["delta"].get("content") for one in choices)
    else:
        choices = answer.json["choices"]
        calls = choices[0]["message"]["tool_calls"]
        reported = [call["function"]["arguments"] for call in calls]
        assert choices[0]["message"]["content"] is None
    assert reported == ['{"a": 27}', "{}"]
    assert choices[-1]["finish_reason"] == "tool_calls"


FORM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": FORM}}


def _plain(calling: Path) -> Path:
    """Return the same model with ordinary tokens for the markers of calls."""
    directory = calling.with_name("plain")
    if not directory.exists():
        shutil.copytree(calling, directory)
        file = directory / "tokenizer.json"
        file.write_text(file.read_text().replace("tool_call>", "tool-call>"))
    return directory


def _schemas(form: Any) -> list[Any]:
    """Return all schemas in a structural tag's grammar."""
    match form:
        case {"type": "json_schema"}:
            return [form["json_schema"]]
        case dict():
            return [schema for each in form.values() for schema in _schemas(each)]
        case list():
            return [schema for each in form for schema in _schemas(each)]
        case _:
            return []


@pytest.mark.parametrize(
    "parser, arguments, tools, expected",
    [
        ("glm45", "json", [STRICT, SUB], [PARAMETERS, ANY]),
        ("qwen3-coder", "free", [STRICT], [PARAMETERS]),
        ("qwen3-coder", "json", [*TOOLS, SUB], [ANY]),
        ("llama3", "schema", [*TOOLS, SUB], [PARAMETERS, ANY]),
        ("glm45", "free", [*TOOLS, SUB], None),
        ("hermes", "json", [STRICT], [PARAMETERS]),
        ("mistral", "json", [STRICT], [PARAMETERS] * 3),  # a list of calls, or a name
    ],
)
async def test_a_call_follows_its_schema_or_is_any_json(
    calling, parser, arguments, tools, expected
):
    """A strict tool follows its schema, the others as the router is configured."""
    directory = calling if parser in ("hermes", "mistral") else _plain(calling)
    async with api_for(directory, tool_parser=parser, tool_arguments=arguments) as talking:
        guide = await talking.guide_of(CHAT, messages=HELLO, tools=tools)
    reported = _schemas(json.loads(guide.structural_tag)) if guide.structural_tag else None
    assert reported == expected


async def test_tools_over_the_limit_of_grammars_are_unconstrained_unless_strict(talking):
    many = [tool(f"{'x' * 50}{n}") for n in range(1024)]
    guide = await talking.guide_of(CHAT, messages=HELLO, tools=TOOLS, tool_choice="auto")
    assert guide.structural_tag
    model_format = ModelFormat(tools="hermes")
    offer = ToolOffer([_tool(each) for each in many], (), parallel=True)
    assert guided([SAMPLING], offer, model_format, "")[0].guide is None
    many[0]["function"]["strict"] = True
    offer = ToolOffer([_tool(each) for each in many], (), parallel=True)
    assert guided([SAMPLING], offer, model_format, "")[0].guide is not None


@pytest.mark.parametrize("parser", ["hermes", "qwen3-coder"])
async def test_with_tools_and_a_schema_the_model_may_call_first(calling, parser):
    """Seen failing: the schema was enforced from the first token, so no tool was called."""
    fields = {"tools": [STRICT], "response_format": FORMAT}
    async with api_for(calling, tool_parser=parser) as talking:
        submit, answer = await talking.ask(CHAT, '{"sum": 42}', messages=HELLO, **fields)
        form = json.loads(submit.sampling.guide.structural_tag)["format"]
        assert form["type"] == "or" and form["elements"][0]["json_schema"] == FORM
        assert _schemas(form) == [FORM, PARAMETERS]
        assert submit.sampling.thought.close  # after the reasoning
        (choice,) = answer.json["choices"]
        assert choice["message"]["content"] == '{"sum": 42}'


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "add"}}], ids=str)
async def test_a_required_call_takes_precedence_over_a_schema(talking, choice):
    """vLLM does the same. Seen failing: 400."""
    fields = {"tools": [*TOOLS, SUB], "tool_choice": choice, "response_format": FORMAT}
    text = '[{"name": "add", "parameters": {}}]'
    submit, answer = await talking.ask(CHAT, text, messages=HELLO, **fields)
    schema = json.loads(submit.sampling.guide.json_schema)
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    # Only the named tool can be called, and only once.
    allowed = ([["add"], ["sub"]], None) if choice == "required" else ([["add"]], 1)
    assert (schema["type"], names, schema.get("maxItems")) == ("array", *allowed)
    (reported,) = answer.json["choices"]
    assert reported["message"]["tool_calls"][0]["function"]["name"] == "add"
    fields["tool_choice"] = "none"
    guide = await talking.guide_of(CHAT, messages=HELLO, **fields)
    assert json.loads(guide.json_schema) == FORM


async def test_a_structural_tag_itself_defines_where_calls_are(talking):
    own = {"type": "structural_tag", "format": {"type": "any_text"}}
    guide = await talking.guide_of(CHAT, messages=HELLO, tools=TOOLS, response_format=own)
    assert json.loads(guide.structural_tag) == own


async def test_a_schema_beside_calls_without_a_grammar_is_rejected(calling):
    fields = {"tools": TOOLS, "response_format": FORMAT}
    async with api_for(calling, tool_parser="harmony") as api:
        answer = await api.post(CHAT, messages=HELLO, **fields)
        assert (answer.status, answer.error["param"]) == (400, "response_format")
        assert "set tool_choice to none or required" in answer.error["message"]


async def test_too_deeply_nested_parameters_are_rejected(talking):
    """Seen failing: 500."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(450):
        schema = {"properties": {"a": schema}}
    tools = [tool("add", parameters=schema)]
    answer = await talking.post(CHAT, messages=HELLO, tools=tools, tool_choice="required")
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "nested too deeply" in answer.error["message"]
    for _ in range(100):  # an optional call needs less of the stack
        schema = {"properties": {"a": schema}}
    offer = optional([{"function": {"name": "add", "parameters": schema, "strict": True}}])
    with pytest.raises(ApiError, match="tools: parameters are nested too deeply"):
        guided([SAMPLING], offer, ModelFormat(tools="hermes"), "")


def test_references_of_a_tool_resolve_within_it_when_tools_are_combined():
    """Two tools define one name differently, and one refers to its root and to an undefined
    name. A value that looks like a reference is a value."""
    trees: dict[str, Any] = {
        "type": "object",
        "properties": {
            "x": {"const": {"$ref": "#"}},
            "$ref": {"$ref": "#/properties/x"},
            "more": {"type": "array", "items": {"$ref": "#"}},
            "leaf": {"$ref": "#/$defs/leaf"},
            "default": {"$ref": "#/$defs/leaf"},
        },
        "$defs": {"leaf": {"type": "string"}},
        "additionalProperties": False,
    }
    leaves = {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"type": "object", "maxProperties": 0}}}
    offered = [_tool(tool("f", parameters=trees)), _tool(tool("g", parameters=leaves))]
    guide = guide_of_calls(offered, parallel=True)
    validator = Draft202012Validator(json.loads(guide.text))

    def is_valid(f: Any, g: Any) -> bool:
        return validator.is_valid([{"name": "f", "parameters": f}, {"name": "g", "parameters": g}])

    leaf = {"x": {"$ref": "#"}, "leaf": "a"}
    for valid in (leaf, {"more": [leaf, {"more": []}]}, {"$ref": {"$ref": "#"}}):
        assert is_valid(valid, {}), valid
    for wrong in ({"x": 1}, {"more": [1]}, {"leaf": {}}, {"default": 1}):
        assert not is_valid(wrong, {}), wrong
    assert not is_valid(leaf, {"a": 1})
    assert enforced(guide.text)


async def test_over_grpc_a_response_to_messages_has_the_same_parts(talking):
    client, tools = talking.grpc, [json.dumps(TOOLS[0])]
    call = client.chat(tools=tools)
    await talking.complete(f"<think>hm</think>Well.{CALL}</s>")
    text, ids, last = await collect(call)
    assert (text, last.reasoning, last.finish_reason) == ("Well.", "hm", "tool_calls")
    (part,) = last.tool_calls
    assert (part.name, part.arguments) == ("add", '{"a": 27, "b": 15}')
    assert ids == talking.ids(f"<think>hm</think>Well.{CALL}</s>")

    called = {"id": part.id, "name": "add", "arguments": part.arguments}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "content": "42", "tool_call_id": part.id},
    ]
    call = client.generate(messages=router_pb2.ChatMessages(messages=messages, tools=tools))
    prompt = talking.text((await talking.complete("42")).token_ids)
    assert '"arguments": {"a": 27, "b": 15}' in prompt and f"({part.id})" in prompt
    assert (await collect(call))[0] == "42"


async def test_over_grpc_with_tools_and_a_grammar_the_model_may_call_first(talking):
    """Seen failing: the grammar was enforced from the first token, so no tool was called."""
    client, tools = talking.grpc, [json.dumps(STRICT)]
    call = client.chat({"guide": {"json_schema": json.dumps(FORM)}}, tools=tools)
    submit = await talking.complete(CALL)
    form = json.loads(submit.sampling.guide.structural_tag)["format"]
    assert form["type"] == "or" and _schemas(form) == [FORM, PARAMETERS]
    (part,) = (await collect(call))[2].tool_calls
    assert part.name == "add"

    call = client.chat(tools=tools)
    reported = json.loads((await talking.complete(CALL)).sampling.guide.structural_tag)
    assert _schemas(reported) == [PARAMETERS]  # a started call follows its schema
    await collect(call)


async def test_over_grpc_a_grammar_beside_calls_without_a_grammar_is_rejected(calling):
    async with router_for(calling, decode=[ABSENT], tool_parser="harmony") as (client, _):
        error = await fails(
            client.chat({"guide": {"json_object": True}}, tools=[json.dumps(STRICT)]),
            StatusCode.INVALID_ARGUMENT,
        )
        assert (error.details() or "").startswith("sampling.guide: cannot be combined")


WRONG_OVER_GRPC = [
    ({"tools": ["{"]}, "messages.tools[0] is not a JSON object"),
    ({"tools": ['{"type": "function"}']}, "messages.tools[0] is not a function"),
    (
        {"tools": [json.dumps(tool("f", parameters=3))]},
        "messages.tools[0].function.parameters must be",
    ),
    ({"tools": [json.dumps(tool("f", strict=3))]}, "messages.tools[0].function.strict must be"),
    ({"tools": ["{}"] * 1025}, "messages.tools has 1025 tools"),
    ({"template_settings": "[]"}, "messages.template_settings is not a JSON object"),
    ({"template_settings": " " * 20_000}, "messages.template_settings has 20000"),
    ({"template_settings": '{"x": 1}'}, "chat_template_kwargs: this model's"),
    ({"reasoning_effort": "high"}, "reasoning_effort: this model's"),
]


async def test_over_grpc_invalid_tools_are_rejected_by_name(calling):
    async with router_for(calling, decode=[ABSENT]) as (client, _):
        for fields, said in WRONG_OVER_GRPC:
            error = await fails(client.chat(**fields), StatusCode.INVALID_ARGUMENT)
            assert (error.details() or "").startswith(said)
