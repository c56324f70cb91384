"""`return_hidden_states` and `return_routed_experts` for clients.

Over HTTP they have SGLang's formats: lists of numbers, and base64 of int32. Over gRPC they are
packed float32 and int16.
"""

import asyncio
from array import array
from base64 import b64decode

import pytest

from protos.decode_pb2 import FromNode, RowLogprobs, Step
from protos.sampling_pb2 import Logprobs
from tests.api.rig import CHAT, COMPLETIONS, HELLO, ask, rest
from tests.support.network.http_client import sse_events

PROMPT = [5, 6, 7]
# Of the tokens of the prompt and of two generated ones.
STATES = [[float(n), n + 0.5] for n in range(5)]
EXPERTS = [[n, 300 + n, 0, 0] for n in range(5)]  # two layers, two experts each
ROWS = {"hidden_states": STATES, "routed_experts": EXPERTS}
CHOICES = [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})]


def packed(field, rows):
    numbers = [number for row in rows for number in row]
    return array("f" if field == "hidden_states" else "h", numbers).tobytes()


def decoded(experts):
    return array("i", b64decode(experts)).tolist()


FLAT = [each for token in EXPERTS for each in token]


def row_logprobs(field, number, rows):
    logprobs = Logprobs(logprob=[-1.0] * len(rows), **{field: packed(field, rows)})
    return [RowLogprobs(request=number, logprobs=logprobs)]


def respond(node, submit, field, tokens=(8, 9, 10)):
    """Respond like a node: each token has the row of the previous token."""
    sampling = submit.sampling
    assert [name for name in ROWS if getattr(sampling, name)] == [field]
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 0)
    assert sampling.HasField("logprobs")
    number, rows = submit.number, ROWS[field]
    node.send(FromNode(step=Step(prompt_logprobs=row_logprobs(field, number, rows[:2]))))
    first = {"request": [number], "token": tokens[:1]}
    node.send(FromNode(step=Step(logprobs=row_logprobs(field, number, rows[2:3]), **first)))
    if tokens[1:]:
        node.send(FromNode(step=Step(logprobs=row_logprobs(field, number, rows[3:]))))
        node.send(FromNode(step=Step(request=[number] * 2, token=tokens[1:])))
    node.finish(number)


async def answered(api, field, path, tokens=(8, 9, 10), **fields):
    answering = asyncio.create_task(api.post(path, **{f"return_{field}": True}, **fields))
    respond(api.node, await api.node.submitted(), field, tokens)
    return (await answering).json


def _meta(event):
    return event["meta_info"]


def _choice(event):
    return event["choices"][0]


async def last_event(api, wire, field, path, part, **fields):
    """Return this part of the last event of a stream. No other event has the field."""
    await wire.post(path, {**fields, f"return_{field}": True, "stream": True})
    respond(api.node, await api.node.submitted(), field)
    assert (await wire.head())[0] == 200
    events = sse_events(b"".join([chunk async for chunk in wire.chunks()]))
    parts = [part(each) for each in events]
    assert [field in each for each in parts] == [False] * (len(parts) - 1) + [True]
    return parts[-1]


@pytest.mark.parametrize("tokens", [(8, 9, 10), (8,)])
async def test_generate_returns_the_states_of_the_prompt_then_of_each_token(api, tokens):
    meta = (await answered(api, "hidden_states", "/generate", tokens, input_ids=PROMPT))[
        "meta_info"
    ]
    assert meta["hidden_states"] == [STATES[:3], *STATES[3 : 2 + len(tokens)]]


async def test_generate_returns_the_experts_of_all_tokens(api):
    meta = (await answered(api, "routed_experts", "/generate", input_ids=PROMPT))["meta_info"]
    assert decoded(meta["routed_experts"]) == FLAT and "hidden_states" not in meta


async def test_a_stream_of_generate_has_rows_in_its_last_event(api, wire):
    async def last(field):
        event = await last_event(api, wire, field, "/generate", _meta, input_ids=PROMPT)
        return event[field]

    assert await last("hidden_states") == [STATES[:3], *STATES[3:]]
    assert decoded(await last("routed_experts")) == FLAT


@pytest.mark.parametrize("path, asked", CHOICES)
async def test_choices_have_the_state_that_predicted_their_last_token(api, wire, path, asked):
    (choice,) = (await answered(api, "hidden_states", path, **asked))["choices"]
    assert choice["hidden_states"] == STATES[-1] and choice["logprobs"] is None
    (choice,) = (await answered(api, "hidden_states", path, (8,), **asked))["choices"]
    assert choice["hidden_states"] == []  # as in SGLang
    choice = await last_event(api, wire, "hidden_states", path, _choice, **asked)
    assert choice["hidden_states"] == STATES[-1]


@pytest.mark.parametrize("path, asked", CHOICES)
async def test_choices_have_the_experts_of_all_tokens(api, wire, path, asked):
    (choice,) = (await answered(api, "routed_experts", path, **asked))["choices"]
    assert decoded(choice["routed_experts"]) == FLAT
    assert choice["logprobs"] is None and "hidden_states" not in choice
    choice = await last_event(api, wire, "routed_experts", path, _choice, **asked)
    assert decoded(choice["routed_experts"]) == FLAT


@pytest.mark.parametrize("field", ROWS)
async def test_grpc_messages_have_packed_rows(client, node, field):
    call = ask(client, **{field: True})
    respond(node, await node.submitted(), field)
    responses = await rest(call)
    of_prompt = b"".join(getattr(each, f"prompt_{field}") for each in responses)
    assert of_prompt == packed(field, ROWS[field][:3])
    assert b"".join(getattr(each, field) for each in responses) == packed(field, ROWS[field][3:])
    assert not any(each.HasField("logprobs") for each in responses)


async def test_logprobs_are_returned_beside_rows_if_requested(client, node):
    call = ask(client, hidden_states=True, logprobs=0, prompt_logprobs=0)
    respond(node, await node.submitted(), "hidden_states")
    responses = await rest(call)
    assert sum(len(each.logprobs.logprob) for each in responses) == 3
    assert sum(len(each.prompt_logprobs.logprob) for each in responses) == 2


@pytest.mark.parametrize("field", ROWS)
async def test_rows_are_returned_only_on_request_and_for_few_requests_at_a_time(api, field):
    _, plain = await api.answered(api.post(COMPLETIONS, prompt=PROMPT), " x")
    assert field not in plain.json["choices"][0]
    refused = await api.post(COMPLETIONS, prompt=PROMPT, n=9, **{f"return_{field}": True})
    assert refused.status == 400
    assert f"return_{field}: 9 responses" in refused.json["error"]["message"]


@pytest.mark.parametrize("field, size", [("hidden_states", 9), ("routed_experts", 6)])
async def test_after_rows_of_a_wrong_size_the_request_is_replayed(client, node, field, size):
    call = ask(client, **{field: True})
    number = (await node.submitted()).number
    logprobs = Logprobs(logprob=[-1.0, -1.0], **{field: bytes(size)})
    node.send(FromNode(step=Step(logprobs=[RowLogprobs(request=number, logprobs=logprobs)])))
    again = await node.submitted()  # over the next stream
    respond(node, again, field)
    assert (await rest(call))[-1].finish_reason == "stop"
