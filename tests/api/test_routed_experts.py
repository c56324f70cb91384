"""`return_routed_experts` as clients get it: SGLang's base64 over HTTP, packed int16 over gRPC."""

import asyncio
from array import array
from base64 import b64decode

import pytest

from protos.decode_pb2 import FromNode, RowLogprobs, Step
from protos.sampling_pb2 import Logprobs
from tests.api.rig import CHAT, COMPLETIONS, HELLO, ask, rest
from tests.support.http_client import sse_events

PROMPT = [5, 6, 7]
EXPERTS = [
    [[n, 300 + n], [0, 0]] for n in range(5)
]  # of the prompt's tokens and two generated ones
FLAT = [each for token in EXPERTS for layer in token for each in layer]


def packed(experts):
    return array("h", [each for token in experts for layer in token for each in layer]).tobytes()


def rows(number, experts):
    logprobs = Logprobs(logprob=[-1.0] * len(experts), routed_experts=packed(experts))
    return [RowLogprobs(request=number, logprobs=logprobs)]


def respond(node, submit):
    """Answer as a node does: with each token the experts of the token before it."""
    assert submit.sampling.routed_experts and not submit.sampling.hidden_states
    assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (0, 0)
    number = submit.number
    node.send(FromNode(step=Step(prompt_logprobs=rows(number, EXPERTS[:2]))))
    first = {"request": [number], "token": [8]}
    node.send(FromNode(step=Step(logprobs=rows(number, EXPERTS[2:3]), **first)))
    node.send(FromNode(step=Step(logprobs=rows(number, EXPERTS[3:]))))
    node.send(FromNode(step=Step(request=[number] * 2, token=[9, 10])))
    node.finish(number)


def decoded(experts):
    return array("i", b64decode(experts)).tolist()


async def answered(api, path, **fields):
    answering = asyncio.create_task(api.post(path, return_routed_experts=True, **fields))
    respond(api.node, await api.node.submitted())
    return (await answering).json


async def streamed(api, wire, path, **fields):
    await wire.post(path, {**fields, "return_routed_experts": True, "stream": True})
    respond(api.node, await api.node.submitted())
    assert (await wire.head())[0] == 200
    return sse_events(b"".join([chunk async for chunk in wire.chunks()]))


async def test_generate_returns_those_of_the_prompt_then_of_each_token(api):
    meta = (await answered(api, "/generate", input_ids=PROMPT))["meta_info"]
    assert decoded(meta["routed_experts"]) == FLAT and "hidden_states" not in meta


async def test_a_stream_of_generate_has_them_in_its_last_event(api, wire):
    events = await streamed(api, wire, "/generate", input_ids=PROMPT)
    events = [each["meta_info"] for each in events]
    assert ["routed_experts" in each for each in events] == [False] * (len(events) - 1) + [True]
    assert decoded(events[-1]["routed_experts"]) == FLAT


@pytest.mark.parametrize(
    "path, asked", [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})]
)
async def test_choices_have_those_of_all_tokens(api, wire, path, asked):
    (choice,) = (await answered(api, path, **asked))["choices"]
    assert decoded(choice["routed_experts"]) == FLAT
    assert choice["logprobs"] is None and "hidden_states" not in choice
    choices = [each["choices"][0] for each in await streamed(api, wire, path, **asked)]
    assert ["routed_experts" in each for each in choices] == [False] * (len(choices) - 1) + [True]
    assert decoded(choices[-1]["routed_experts"]) == FLAT


async def test_messages_of_grpc_have_them_packed(client, node):
    call = ask(client, routed_experts=True)
    respond(node, await node.submitted())
    responses = await rest(call)
    assert b"".join(each.prompt_routed_experts for each in responses) == packed(EXPERTS[:3])
    assert b"".join(each.routed_experts for each in responses) == packed(EXPERTS[3:])


async def test_unasked_nothing_is_returned_and_few_responses_may_ask(api):
    _, plain = await api.answered(api.post(COMPLETIONS, prompt=PROMPT), " x")
    assert "routed_experts" not in plain.json["choices"][0]
    refused = await api.post(COMPLETIONS, prompt=PROMPT, n=9, return_routed_experts=True)
    assert refused.status == 400
    assert "return_routed_experts: 9 responses" in refused.json["error"]["message"]


async def test_after_experts_of_a_wrong_size_the_request_is_replayed(client, node):
    call = ask(client, routed_experts=True)
    number = (await node.submitted()).number
    logprobs = Logprobs(logprob=[-1.0, -1.0], routed_experts=bytes(6))
    node.send(FromNode(step=Step(logprobs=[RowLogprobs(request=number, logprobs=logprobs)])))
    again = await node.submitted()  # over the next stream
    respond(node, again)
    assert (await rest(call))[-1].finish_reason == "stop"
