"""`return_hidden_states` as clients get it: SGLang's lists over HTTP, packed float32 over gRPC."""

import asyncio
from array import array

import pytest

from protos.decode_pb2 import FromNode, RowLogprobs, Step
from protos.sampling_pb2 import Logprobs
from tests.api.rig import CHAT, COMPLETIONS, HELLO, ask, rest
from tests.support.http_client import sse_events

PROMPT = [5, 6, 7]
STATES = [[float(n), n + 0.5] for n in range(5)]  # of the prompt's tokens and two generated ones


def packed(states):
    return array("f", [number for state in states for number in state]).tobytes()


def told(number, states):
    logprobs = Logprobs(logprob=[-1.0] * len(states), hidden_states=packed(states))
    return [RowLogprobs(request=number, logprobs=logprobs)]


def respond(node, submit, tokens=(8, 9, 10)):
    """Answer as a node does: before each token the state that it was predicted from."""
    assert submit.sampling.hidden_states
    assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (0, 0)
    assert submit.sampling.HasField("logprobs")
    number = submit.number
    node.send(FromNode(step=Step(prompt_logprobs=told(number, STATES[:2]))))
    node.send(
        FromNode(step=Step(logprobs=told(number, STATES[2:3]), request=[number], token=tokens[:1]))
    )
    if tokens[1:]:
        node.send(FromNode(step=Step(logprobs=told(number, STATES[3:]))))
        rows = {"request": [number] * 2, "token": tokens[1:]}
        node.send(FromNode(step=Step(**rows)))
    node.finish(number)


async def answered(api, path, tokens=(8, 9, 10), **fields):
    answering = asyncio.create_task(api.post(path, return_hidden_states=True, **fields))
    respond(api.node, await api.node.submitted(), tokens)
    return (await answering).json


async def streamed(api, wire, path, **fields):
    await wire.post(path, {**fields, "return_hidden_states": True, "stream": True})
    respond(api.node, await api.node.submitted())
    assert (await wire.head())[0] == 200
    return sse_events(b"".join([chunk async for chunk in wire.chunks()]))


@pytest.mark.parametrize("tokens", [(8, 9, 10), (8,)])
async def test_generate_returns_the_states_of_the_prompt_then_of_each_token(api, tokens):
    meta = (await answered(api, "/generate", tokens, input_ids=PROMPT))["meta_info"]
    assert meta["hidden_states"] == [STATES[:3], *STATES[3 : 2 + len(tokens)]]


async def test_a_stream_of_generate_has_them_in_its_last_event(api, wire):
    events = await streamed(api, wire, "/generate", input_ids=PROMPT)
    events = [each["meta_info"] for each in events]
    assert ["hidden_states" in each for each in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["hidden_states"] == [STATES[:3], *STATES[3:]]


@pytest.mark.parametrize(
    "path, asked", [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})]
)
async def test_choices_have_the_state_that_their_last_token_was_predicted_from(api, path, asked):
    (choice,) = (await answered(api, path, **asked))["choices"]
    assert choice["hidden_states"] == STATES[-1] and choice["logprobs"] is None
    (choice,) = (await answered(api, path, (8,), **asked))["choices"]
    assert choice["hidden_states"] == []  # as in SGLang


@pytest.mark.parametrize(
    "path, asked", [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})]
)
async def test_streamed_choices_have_it_in_their_last_event(api, wire, path, asked):
    choices = [each["choices"][0] for each in await streamed(api, wire, path, **asked)]
    assert ["hidden_states" in each for each in choices] == [False] * (len(choices) - 1) + [True]
    assert choices[-1]["hidden_states"] == STATES[-1]


async def test_messages_of_grpc_have_them_packed(client, node):
    call = ask(client, hidden_states=True)
    respond(node, await node.submitted())
    responses = await rest(call)
    assert b"".join(each.prompt_hidden_states for each in responses) == packed(STATES[:3])
    assert b"".join(each.hidden_states for each in responses) == packed(STATES[3:])
    assert not any(each.HasField("logprobs") for each in responses)


async def test_log_probabilities_are_returned_beside_them_if_requested(client, node):
    call = ask(client, hidden_states=True, logprobs=0, prompt_logprobs=0)
    respond(node, await node.submitted())
    responses = await rest(call)
    assert sum(len(each.logprobs.logprob) for each in responses) == 3
    assert sum(len(each.prompt_logprobs.logprob) for each in responses) == 2


async def test_unasked_nothing_is_returned_and_few_responses_may_ask(api, client):
    _, plain = await api.answered(api.post(COMPLETIONS, prompt=PROMPT), " x")
    assert "hidden_states" not in plain.json["choices"][0]
    refused = await api.post(COMPLETIONS, prompt=PROMPT, n=9, return_hidden_states=True)
    assert refused.status == 400 and "9 responses" in refused.json["error"]["message"]


async def test_after_hidden_states_of_a_wrong_size_the_request_is_replayed(client, node):
    call = ask(client, hidden_states=True)
    number = (await node.submitted()).number
    logprobs = Logprobs(logprob=[-1.0, -1.0], hidden_states=bytes(9))
    node.send(FromNode(step=Step(logprobs=[RowLogprobs(request=number, logprobs=logprobs)])))
    again = await node.submitted()  # over the next stream
    respond(node, again)
    assert (await rest(call))[-1].finish_reason == "stop"
