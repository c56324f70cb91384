"""/v1/messages, in the form that Anthropic's clients use."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from protos.decode_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.router.openai_rig import api_for
from tests.router.talk import CALL, Talk, calling_model, talk
from tests.support.http_client import Response

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_model(tmp_path_factory.mktemp("calling"))


async def _asked(talking: Talk, text: str, **fields: Any) -> tuple[Any, str]:
    """The message that `text` becomes, and the prompt."""
    asking = asyncio.create_task(talking.api.post(MESSAGES, **{**ASKED, **fields}))
    prompt = await talking.answer(text)
    return (await asking).json, prompt


def _events(response: Response) -> list[dict[str, Any]]:
    told = []
    for event in response.body.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


async def test_a_message_is_answered_with_one(calling: Path) -> None:
    async with talk(calling) as talking:
        message, prompt = await _asked(
            talking, "hello you", system=[{"type": "text", "text": "Be kind."}]
        )
        assert prompt.startswith("[system] Be kind.")
        assert message["content"] == [{"type": "text", "text": "hello you"}]
        assert (message["type"], message["role"]) == ("message", "assistant")
        assert (message["stop_reason"], message["id"][:4]) == ("end_turn", "msg_")
        assert message["usage"]["output_tokens"] == len(talking.ids("hello you"))
        assert message["usage"]["input_tokens"] == len(talking.ids(prompt))


async def test_a_tool_is_used_and_its_result_told(calling: Path) -> None:
    async with talk(calling) as talking:
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


async def test_a_stream_tells_blocks_one_after_the_other(calling: Path) -> None:
    async with talk(calling) as talking:
        asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, tools=TOOLS, stream=True))
        number, _ = await talking.asked()
        tokens = talking.ids(f"<think>hm</think>Well.\n{CALL}</s>")
        for token in tokens[:-1]:
            talking.api.node.say({number: [token]})
        talking.api.node.say({number: tokens[-1:]}, ended={number: FINISH_REASON_STOP})
        events = _events(await asking)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in begun] == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in begun] == [0, 1, 2]
    told = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            _, text = event["delta"].values()
            told[event["index"]] += text
    assert told == ["hm", "Well.", '{"a": 27, "b": 15}']
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(tokens)


async def test_an_answer_that_is_cut_off_says_so(calling: Path) -> None:
    async with talk(calling) as talking:
        asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, tools=TOOLS))
        await talking.answer(CALL[:45], reason=FINISH_REASON_LENGTH)
        message = (await asking).json
        assert message["stop_reason"] == "model_context_window_exceeded"  # 500 were asked for
        assert message["content"][0]["input"] == {}


async def test_an_answer_that_is_cut_off_at_its_max_tokens_says_so(calling: Path) -> None:
    async with talk(calling) as talking:
        tokens = talking.ids("hi there")
        fields = {**ASKED, "max_tokens": len(tokens)}
        asking = asyncio.create_task(talking.api.post(MESSAGES, **fields))
        await talking.answer("hi there", reason=FINISH_REASON_LENGTH)
        assert (await asking).json["stop_reason"] == "max_tokens"


async def test_what_is_thought_can_be_left_out(calling: Path) -> None:
    async with talk(calling) as talking:
        message, _ = await _asked(talking, "<think>hm</think>hi", thinking={"type": "disabled"})
        assert message["content"] == [{"type": "text", "text": "hi"}]


@pytest.mark.parametrize(
    "fields, param",
    [
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
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused_by_name(
    calling: Path, fields: dict[str, Any], param: str
) -> None:
    async with api_for(calling) as api:
        answer = await api.post(MESSAGES, **{**ASKED, **fields})
        assert answer.status == 400, answer.body
        assert (answer.error["param"] or "").startswith(param), answer.body


async def test_the_tokens_of_a_prompt_are_counted_as_they_are_billed(calling: Path) -> None:
    asked = {"messages": ASKED["messages"], "system": "Be kind.", "tools": TOOLS}
    async with talk(calling) as talking:
        message, _ = await _asked(talking, "hello you", **asked)
        counted = await talking.api.post(f"{MESSAGES}/count_tokens", **asked)
        assert counted.json == {"input_tokens": message["usage"]["input_tokens"]}
        fewer = await talking.api.post(f"{MESSAGES}/count_tokens", messages=ASKED["messages"])
        assert fewer.json["input_tokens"] < counted.json["input_tokens"]
        refused = await talking.api.post(f"{MESSAGES}/count_tokens", **asked, wisdom=1)
        assert refused.status == 400
        assert "wisdom" in refused.error["message"]
