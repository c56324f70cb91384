"""/v1/messages, in the form that Anthropic's clients use."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.config import ClientsConfig
from protos.decode_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.api.auth.rig import entry, write
from tests.api.openai.openai_rig import api_for
from tests.api.talk import CALL, Talk, calling_model, talk
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


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}], ids=str
)
async def test_an_answer_has_the_form_that_is_asked_for(
    calling: Path, fields: dict[str, Any]
) -> None:
    """Seen failing: 400. With tools it may be calls."""
    async with talk(calling) as talking:
        asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, **fields))
        submit = await talking.api.node.submitted()
        assert json.loads(submit.sampling.guide.json_schema) == SCHEMA
        said = talking.ids('{"sum": 42}')
        talking.api.node.say({submit.number: said}, ended={submit.number: FINISH_REASON_STOP})
        assert (await asking).json["content"] == [{"type": "text", "text": '{"sum": 42}'}]
        asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, **fields, tools=TOOLS))
        submit = await talking.api.node.submitted()
        form = json.loads(submit.sampling.guide.structural_tag)["format"]
        assert form["type"] == "or" and form["elements"][0]["json_schema"] == SCHEMA
        said = talking.ids(CALL)
        talking.api.node.say({submit.number: said}, ended={submit.number: FINISH_REASON_STOP})
        assert (await asking).json["stop_reason"] == "tool_use"


async def test_hints_are_ignored_and_named(calling: Path, model: Path) -> None:
    """Seen failing: 400."""
    managed = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    config = {"output_config": {"effort": "low"}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    async with talk(calling) as talking:
        for fields, named in (
            (managed, "context_management"),
            (config, "output_config.effort"),
            (thinking, None),
        ):
            asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, **fields))
            submit = await talking.api.node.submitted()
            assert submit.sampling.thinking_budget == (100 if fields is thinking else 0)
            talking.api.node.say(ended={submit.number: FINISH_REASON_STOP})
            answer = await asking
            assert answer.status == 200, answer.body
            assert answer.headers.get("baton-ignored-fields") == named
        counted = await talking.api.post(
            f"{MESSAGES}/count_tokens", messages=ASKED["messages"], **managed, **config
        )
        assert counted.headers["baton-ignored-fields"] == "context_management"
    async with api_for(model) as api:  # which does not think
        asked = {**ASKED, "max_tokens": 20}
        asking = asyncio.create_task(api.post(MESSAGES, **asked, **thinking))
        await api.complete()
        answer = await asking
        assert answer.status == 200, answer.body
        assert answer.headers["baton-ignored-fields"] == "thinking"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stop_sequence_is_told(calling: Path, stream: bool) -> None:
    """Seen failing: end_turn, and no sequence."""
    async with talk(calling) as talking:
        fields = {"stop_sequences": ["END"], "stream": stream}
        asking = asyncio.create_task(talking.api.post(MESSAGES, **ASKED, **fields))
        number, _ = await talking.asked()
        talking.api.node.say({number: talking.ids("hello END you")})
        answer = await asking
        told = _events(answer)[-2]["delta"] if stream else answer.json
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")


async def test_errors_have_the_form_that_anthropics_clients_know(
    calling: Path, tmp_path: Path
) -> None:
    """Seen failing: no type beside the error."""
    async with api_for(calling) as api:
        kinds = {}
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            for model in ("none", None):
                answer = await api.post(path, model=model, messages="x")
                assert answer.json["type"] == "error"
                kinds[path, answer.status] = answer.error["type"]
        answer = await api.post(MESSAGES, **{**ASKED, "model": "none"})
        assert (answer.status, answer.error["type"]) == (404, "not_found_error")
        assert {*kinds.values()} == {"invalid_request_error"}
    file = write(tmp_path / "keys", entry("alice"))
    async with api_for(calling, clients=ClientsConfig(api_keys=file)) as api:
        answer = await api.post(MESSAGES, **ASKED)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        assert answer.json["type"] == "error"
        other = await api.post("/v1/chat/completions", messages=ASKED["messages"])
        assert (other.status, list(other.json)) == (401, ["error"])
