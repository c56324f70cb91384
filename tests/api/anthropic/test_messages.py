"""/v1/messages, in the format of Anthropic's clients."""

import asyncio
import json
from typing import Any

import pytest

from common.config import ClientsConfig
from protos.decode_pb2 import FINISH_REASON_LENGTH
from tests.api.auth.rig import entry, write
from tests.api.models import CALL
from tests.api.rig import Api, api_for
from tests.support.network.http_client import Response

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]


async def _asked(talking: Api, text: str, **fields: Any) -> tuple[Any, str]:
    """Return the message for `text`, and the prompt."""
    submit, answer = await talking.ask(MESSAGES, text, **{**ASKED, **fields})
    return answer.json, talking.text(submit.token_ids)


async def _cut_off(talking: Api, text: str, **fields: Any) -> Any:
    """Return the message for `text` at its length limit."""
    asked = talking.post(MESSAGES, **{**ASKED, **fields})
    return (await talking.answered(asked, text, reason=FINISH_REASON_LENGTH))[1].json


def _events(response: Response) -> list[dict[str, Any]]:
    reported = []
    for event in response.body.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        reported.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {reported[-1]['type']}"
    return reported


async def test_a_message_gets_a_response(talking):
    message, prompt = await _asked(
        talking, "hello you", system=[{"type": "text", "text": "Be kind."}]
    )
    assert prompt.startswith("[system] Be kind.")
    assert message["content"] == [{"type": "text", "text": "hello you"}]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert (message["stop_reason"], message["id"][:4]) == ("end_turn", "msg_")
    assert message["usage"]["output_tokens"] == len(talking.ids("hello you"))
    assert message["usage"]["input_tokens"] == len(talking.ids(prompt))


async def test_a_tool_is_used_and_its_result_sent_back(talking):
    message, prompt = await _asked(talking, f"<think>hm</think>Well.\n{CALL}</s>", tools=TOOLS)
    assert '"description": "Adds."' in prompt
    thought, said, used = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert (said["text"], used["type"]) == ("Well.", "tool_use")
    assert (used["name"], used["input"]) == ("add", {"a": 27, "b": 15})
    assert message["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "42"}
    again = [
        *ASKED["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    message, prompt = await _asked(talking, "It is 42.", tools=TOOLS, messages=again)
    order = ["hm</think>", "Well.", '"a": 27', f"({used['id']})", "[user] so?"]
    places = [prompt.index(text) for text in order]
    assert places == sorted(places)
    assert message["content"] == [{"type": "text", "text": "It is 42."}]


async def test_a_stream_has_blocks_one_after_the_other(talking):
    text = f"<think>hm</think>Well.\n{CALL}</s>"
    asked = talking.post(MESSAGES, **ASKED, tools=TOOLS, stream=True)
    events = _events((await talking.say_one_by_one(text, asked))[1])
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in begun] == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in begun] == [0, 1, 2]
    reported = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            _, piece = event["delta"].values()
            reported[event["index"]] += piece
    assert reported == ["hm", "Well.", '{"a": 27, "b": 15}']
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(talking.ids(text))


async def test_a_response_at_its_length_limit_has_that_stop_reason(talking):
    message = await _cut_off(talking, CALL[:45], tools=TOOLS)
    assert message["stop_reason"] == "model_context_window_exceeded"  # 500 were requested
    assert message["content"][0]["input"] == {}
    message = await _cut_off(talking, "hi there", max_tokens=len(talking.ids("hi there")))
    assert message["stop_reason"] == "max_tokens"


async def test_thinking_can_be_left_out(talking):
    message, _ = await _asked(talking, "<think>hm</think>hi", thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": "hi"}]


WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"max_token": 5}, "max_token"),
]


async def test_invalid_fields_are_rejected_by_name(talking):
    for fields, param in WRONG:
        await talking.refuses(param, MESSAGES, **{**ASKED, **fields})


async def test_counted_prompt_tokens_equal_the_billed_ones(talking):
    asked = {"messages": ASKED["messages"], "system": "Be kind.", "tools": TOOLS}
    message, _ = await _asked(talking, "hello you", **asked)
    counted = await talking.post(f"{MESSAGES}/count_tokens", **asked)
    assert counted.json == {"input_tokens": message["usage"]["input_tokens"]}
    fewer = await talking.post(f"{MESSAGES}/count_tokens", messages=ASKED["messages"])
    assert fewer.json["input_tokens"] < counted.json["input_tokens"]
    refused = await talking.post(f"{MESSAGES}/count_tokens", **asked, wisdom=1)
    assert refused.status == 400
    assert "wisdom" in refused.error["message"]


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}], ids=str
)
async def test_a_response_follows_the_requested_schema(talking, fields):
    """Seen failing: 400. With tools it may be calls."""
    submit, answer = await talking.ask(MESSAGES, '{"sum": 42}', **ASKED, **fields)
    assert json.loads(submit.sampling.guide.json_schema) == SCHEMA
    assert answer.json["content"] == [{"type": "text", "text": '{"sum": 42}'}]
    submit, answer = await talking.ask(MESSAGES, CALL, **ASKED, **fields, tools=TOOLS)
    form = json.loads(submit.sampling.guide.structural_tag)["format"]
    assert form["type"] == "or" and form["elements"][0]["json_schema"] == SCHEMA
    assert answer.json["stop_reason"] == "tool_use"


async def test_ignored_hints_are_reported_by_name(talking, api):
    """Seen failing: 400."""
    managed = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    config = {"output_config": {"effort": "low"}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    for fields, named in (
        (managed, "context_management"),
        (config, "output_config.effort"),
        (thinking, None),
    ):
        submit, answer = await talking.ask(MESSAGES, **ASKED, **fields)
        assert submit.sampling.thinking_budget == (100 if fields is thinking else 0)
        assert answer.headers.get("baton-ignored-fields") == named
    counted = await talking.post(
        f"{MESSAGES}/count_tokens", messages=ASKED["messages"], **managed, **config
    )
    assert counted.headers["baton-ignored-fields"] == "context_management"
    # A model without reasoning.
    _, answer = await api.ask(MESSAGES, **{**ASKED, "max_tokens": 20}, **thinking)
    assert answer.headers["baton-ignored-fields"] == "thinking"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_matched_stop_sequence_is_reported(talking, stream):
    """Seen failing: end_turn without a sequence."""
    fields = {"stop_sequences": ["END"], "stream": stream}
    asking = asyncio.create_task(talking.post(MESSAGES, **ASKED, **fields))
    number = (await talking.node.submitted()).number
    talking.node.say({number: talking.ids("hello END you")})
    answer = await asking
    reported = _events(answer)[-2]["delta"] if stream else answer.json
    assert (reported["stop_reason"], reported["stop_sequence"]) == ("stop_sequence", "END")


async def test_errors_have_anthropics_format(talking, calling, tmp_path):
    """Seen failing: no type beside the error."""
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        for model in ("none", None):
            answer = await talking.post(path, model=model, messages="x")
            assert answer.json["type"] == "error"
            assert answer.error["type"] == "invalid_request_error"
    answer = await talking.post(MESSAGES, **{**ASKED, "model": "none"})
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    file = write(tmp_path / "keys", entry("alice"))
    async with api_for(calling, clients=ClientsConfig(api_keys=file)) as api:
        answer = await api.post(MESSAGES, **ASKED)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        assert answer.json["type"] == "error"
        other = await api.post("/v1/chat/completions", messages=ASKED["messages"])
        assert (other.status, list(other.json)) == (401, ["error"])
