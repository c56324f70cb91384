"""Reasoning budgets in all request forms, and the position at which the response format begins."""

from typing import Any

import pytest
from grpc import StatusCode

from protos import sampling_pb2
from tests.api.rig import CHAT, COMPLETIONS, HELLO, Api, api_for, collect, fails, tool

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = {"response_format": {"type": "json_object"}}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
}


async def _sent(talking: Api, path: str, **fields: Any) -> sampling_pb2.Sampling:
    submit, _ = await talking.ask(path, **{**ASKED[path], **fields})
    return submit.sampling


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
async def test_a_reasoning_budget_reaches_the_node_with_the_marker_tokens(calling, path, fields):
    async with api_for(calling) as talking:
        opens, closes = talking.ids("<think>")[0], talking.ids("</think>")[0]
        sampling = await _sent(talking, path, **fields)
        assert sampling.thinking_budget == 5
        assert (sampling.thought.open, sampling.thought.close) == (opens, closes)
        sampling = await _sent(talking, path)
        assert not sampling.HasField("thinking_budget") and not sampling.HasField("thought")
    async with api_for(calling, reasoning_parser="deepseek-r1") as talking:
        sampling = await _sent(talking, path, **fields)
        assert not sampling.thought.HasField("open")  # the prompt has started it
        assert sampling.thought.close == closes


async def test_a_schema_applies_after_the_reasoning_if_there_is_any(calling):
    async with api_for(calling) as talking:
        assert (await _sent(talking, CHAT, **JSON)).HasField("thought")
        assert not (await _sent(talking, CHAT, **JSON, **NO_THOUGHT)).HasField("thought")
    async with api_for(calling, reasoning_parser="none") as talking:
        assert not (await _sent(talking, CHAT, **JSON)).HasField("thought")


async def test_a_model_without_reasoning_markers_rejects_a_budget(talking, api):
    budget = {"thinking_token_budget": 5}
    refused = 400, "thinking_token_budget"
    assert await talking.refused(COMPLETIONS, prompt="hi", **budget) == refused
    assert await api.refused(CHAT, messages=HELLO, **budget) == refused
    assert await talking.refused(CHAT, messages=HELLO, thinking_budget=6, **budget) == refused


async def test_required_calls_may_follow_reasoning(talking):
    text = '<think>hm</think>\n\n[{"name": "add", "parameters": {"a": 1}}]'
    choice, _ = await talking.chat(text, tools=[tool("add")], tool_choice="required")
    assert choice.message.reasoning_content == "hm"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert not choice.message.content


async def test_a_budget_over_grpc_requires_messages(talking):
    sampling = sampling_pb2.Sampling(thinking_budget=5)
    call = talking.grpc.chat(sampling)
    sent = (await talking.complete()).sampling
    assert sent.thinking_budget == 5 and sent.thought.HasField("open")
    await collect(call)
    error = await fails(talking.grpc.generate("hi", sampling=sampling), StatusCode.INVALID_ARGUMENT)
    assert (error.details() or "").startswith("sampling.thinking_budget: ")
