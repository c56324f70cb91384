"""Reasoning budgets in all request forms, and the position at which the response format begins."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from protos import router_pb2, sampling_pb2
from protos.decode_pb2 import FINISH_REASON_STOP
from tests.api.openai.openai_rig import CHAT, COMPLETIONS, HELLO, api_for
from tests.api.rig import collect, failure, router_for
from tests.api.talk import Talk, calling_model, talk
from tests.support.stub_decode_node import StubDecodeNode

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = {"response_format": {"type": "json_object"}}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_model(tmp_path_factory.mktemp("calling"))


async def _sent(talking: Talk, path: str, fields: dict[str, Any]) -> sampling_pb2.Sampling:
    asking = asyncio.create_task(talking.api.post(path, **{**ASKED[path], **fields}))
    sampling = (await talking.api.complete()).sampling
    assert (await asking).status == 200
    return sampling


@pytest.mark.parametrize(
    "path, fields",
    [
        (CHAT, {"thinking_token_budget": 5}),
        (CHAT, {"thinking_budget": 5}),
        (RESPONSES, {"thinking_token_budget": 5}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
    ids=str,
)
async def test_a_budget_reaches_the_node_with_the_tokens_that_mark_thought(
    calling: Path, path: str, fields: dict[str, Any]
) -> None:
    async with talk(calling) as talking:
        opens, closes = talking.ids("<think>")[0], talking.ids("</think>")[0]
        sampling = await _sent(talking, path, fields)
        assert sampling.thinking_budget == 5
        assert (sampling.thought.open, sampling.thought.close) == (opens, closes)
        sampling = await _sent(talking, path, {})
        assert not sampling.HasField("thinking_budget") and not sampling.HasField("thought")
    async with talk(calling, reasoning_parser="deepseek-r1") as talking:
        sampling = await _sent(talking, path, fields)
        assert not sampling.thought.HasField("open")  # the prompt has begun it
        assert sampling.thought.close == closes


async def test_a_form_is_of_what_is_behind_the_thought_if_there_is_any(calling: Path) -> None:
    async with talk(calling) as talking:
        assert (await _sent(talking, CHAT, JSON)).HasField("thought")
        assert not (await _sent(talking, CHAT, {**JSON, **NO_THOUGHT})).HasField("thought")
    async with talk(calling, reasoning_parser="none") as talking:
        assert not (await _sent(talking, CHAT, JSON)).HasField("thought")


async def test_nobody_who_cannot_tell_thought_takes_a_budget_for_it(
    calling: Path, model: Path
) -> None:
    for directory, path, asked in (
        (calling, COMPLETIONS, {"prompt": "hi"}),
        (model, CHAT, {"messages": HELLO}),
    ):
        async with api_for(directory) as api:
            answer = await api.post(path, **asked, thinking_token_budget=5)
            assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget")
    async with api_for(calling) as api:
        differ = {"thinking_token_budget": 5, "thinking_budget": 6}
        answer = await api.post(CHAT, messages=HELLO, **differ)
        assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget")


async def test_calls_that_must_be_made_may_follow_thought(calling: Path) -> None:
    add = {"type": "function", "function": {"name": "add"}}
    async with talk(calling) as talking:
        text = '<think>hm</think>\n\n[{"name": "add", "parameters": {"a": 1}}]'
        choice, _ = await talking.ask(text, tools=[add], tool_choice="required")
        assert choice.message.reasoning_content == "hm"
        assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
        assert not choice.message.content


async def test_a_budget_over_grpc_is_for_messages_too(calling: Path) -> None:
    user = router_pb2.ChatMessage(role="user", content="hi")
    messages = router_pb2.ChatMessages(messages=[user])
    sampling = sampling_pb2.Sampling(thinking_budget=5)
    async with StubDecodeNode() as node:
        async with router_for(calling, decode=[node.address]) as (client, _):
            await client.wait_until_serving()
            call = client.generate(messages=messages, sampling=sampling)
            submit = await node.submitted()
            assert submit.sampling.thinking_budget == 5
            assert submit.sampling.thought.HasField("open")
            node.say({submit.number: [1]}, ended={submit.number: FINISH_REASON_STOP})
            await collect(call)
            error = await failure(client.generate("hi", sampling=sampling))
            assert error.code() is StatusCode.INVALID_ARGUMENT
            assert (error.details() or "").startswith("sampling.thinking_budget: ")
