"""/v1/responses with OpenAI's own client."""

import asyncio
import json
from typing import Any

from protos.decode_pb2 import FINISH_REASON_LENGTH
from tests.api.models import CALL
from tests.api.rig import Api

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
]


async def _asked(talking: Api, text: str, **fields: Any) -> tuple[Any, str]:
    """Return the response for `text`, and the prompt."""
    asked = talking.client.responses.create(model=talking.model, **fields)
    submit, response = await talking.answered(asked, text)
    return response, talking.text(submit.token_ids)


async def test_a_text_gets_a_response(talking):
    response, prompt = await _asked(
        talking, "hello you", input="hi", instructions="Be kind.", max_output_tokens=50
    )
    assert prompt.startswith("[system] Be kind.") and "[user] hi" in prompt
    assert response.output_text == "hello you"
    assert (response.status, response.object) == ("completed", "response")
    assert response.id.startswith("resp_") and response.instructions == "Be kind."
    usage = response.usage
    assert usage.output_tokens == len(talking.ids("hello you"))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_reasoning_text_and_calls_are_items_that_can_be_sent_back(talking):
    response, prompt = await _asked(
        talking, f"<think>hm</think>Well.\n{CALL}", input="hi", tools=TOOLS
    )
    assert '"name": "add"' in prompt
    thought, message, call = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.content[0].text) == ("message", "Well.")
    assert (call.type, call.name) == ("function_call", "add")
    assert call.arguments == '{"a": 27, "b": 15}'
    again: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *response.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    response, prompt = await _asked(talking, "It is 42.", input=again, tools=TOOLS)
    said = prompt.partition("[assistant]")[2]
    assert said.index("hm</think>") < said.index("Well.") < said.index('"a": 27')
    assert said.count("[assistant]") == 1  # the requested one
    assert f"({call.call_id})" in said
    assert response.output_text == "It is 42."


async def test_openais_client_makes_the_response_from_a_stream(talking):
    kinds = []
    text = f"<think>hm</think>Well.\n{CALL}</s>"
    _, response = await talking.say_one_by_one(text, _streamed(talking, kinds))
    thought, message, call = response.output
    assert thought.content[0].text == "hm"
    assert message.content[0].text == "Well."
    assert call.arguments == '{"a": 27, "b": 15}'
    assert {thought.status, message.status, call.status} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    order = [kind for kind in dict.fromkeys(kinds) if "item" in kind or "done" in kind]
    assert order[0] == "response.output_item.added"
    assert kinds.count("response.output_item.done") == 3


async def _streamed(talking: Api, kinds: list[str]) -> Any:
    stream = talking.client.responses.stream(model=talking.model, input="hi", tools=TOOLS)
    numbers = []
    async with stream as events:
        async for event in events:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
        assert numbers == list(range(len(numbers)))
        return await events.get_final_response()


async def test_a_response_at_its_length_limit_is_incomplete(talking):
    asked = talking.post(RESPONSES, input="hi")
    reported = (await talking.answered(asked, "hello", reason=FINISH_REASON_LENGTH))[1].json
    assert reported["status"] == "incomplete"
    assert reported["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reported["output"][0]["status"] == "incomplete"


async def test_a_response_can_follow_a_schema_or_be_a_call(talking):
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    for fields, guided in (
        ({"text": form}, schema),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}}, None),
    ):
        submit, _ = await talking.ask(RESPONSES, "{}", input="hi", **fields)
        reported = json.loads(submit.sampling.guide.json_schema)
        assert reported == guided if guided else reported["maxItems"] == 1


async def test_an_error_in_a_stream_is_an_event(talking):
    asking = asyncio.create_task(talking.post(RESPONSES, input="hi", stream=True))
    number = (await talking.node.submitted()).number
    node = talking.node
    node.say({number: talking.ids("hello")})
    node.say({number: talking.ids("x" * 4000)})
    events = (await asking).body.decode().strip().split("\n\n")
    assert events[0].startswith("event: response.created\ndata: {")
    assert events[-1].startswith('event: error\ndata: {"type":"error"')


WRONG = [
    ({}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"input": "x", "tools": TOOLS, "tool_choice": {"name": "sub"}}, "tool_choice"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"input": "x", "max_output_token": 5}, "max_output_token"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
    ({"input": []}, "input"),
    ({"input": "x", "max_output_tokens": -5}, "max_output_tokens"),
]


async def test_invalid_fields_are_rejected_by_name(talking):
    for fields, param in WRONG:
        await talking.refuses(param, RESPONSES, **fields)


async def test_ignored_hints_of_responses_are_reported_by_name(talking):
    """Seen failing: 400."""
    hints = {
        "reasoning": {"effort": "high"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "max_tool_calls": 3,
        "include": ["web_search_call.action.sources"],
    }
    _, answer = await talking.ask(RESPONSES, "hello", input="hi", **hints)
    named = {*answer.headers["baton-ignored-fields"].split(", ")}
    assert named == {"reasoning.effort", "text.verbosity", "truncation", "max_tool_calls"}


async def test_errors_name_the_field_of_this_api(talking, api):
    """Seen failing: messages[1].tool_calls, which no client of this endpoint has sent."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a'}
    submit, _ = await talking.ask(RESPONSES, "hello", instructions="x", input=[call])
    assert '"arguments": {"a}' in talking.text(submit.token_ids)
    answer = await api.post(RESPONSES, instructions="x", input=[call])
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert answer.error["message"].startswith("input: this model's chat template does not")
