"""Responses of the OpenAI API, from a decode node with scripted output."""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest
from grpc import StatusCode

from protos.decode_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FromNode,
    RowLogprobs,
    Step,
)
from protos.sampling_pb2 import Logprobs
from tests.api.models import CONTEXT_LENGTH, ids, write_model
from tests.api.rig import (
    AT_ONCE,
    CHAT,
    COMPLETIONS,
    HELLO,
    api_for,
    collect,
    eventually,
    fails,
    router_for,
)
from tests.support.network.http_client import WAIT_S, connected, get, not_reading, sse_events

MANY_TOKENS = 2000
BOTH = pytest.mark.parametrize(
    "endpoint, asked", [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})]
)
CHAT_PROMPT = [0, *ids("[user] hello\n[assistant]")]


async def test_a_completion_has_text_finish_reason_and_usage(api):
    submit, answer = await api.answered(
        api.client.completions.create(model=api.model, prompt="the fox", max_tokens=30),
        " jumps",
        cached_tokens=2,
    )
    assert list(submit.token_ids) == [0, *ids("the fox")]
    assert answer.id == f"cmpl-{submit.request_id}"
    assert (answer.object, answer.model) == ("text_completion", api.model)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " jumps", "stop")
    assert answer.usage is not None
    num_prompt, num_answer = len(submit.token_ids), len(ids(" jumps"))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == num_answer
    assert answer.usage.total_tokens == num_prompt + num_answer
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_a_chat_is_rendered_and_the_response_has_the_role_assistant(api):
    submit, answer = await api.answered(
        api.client.chat.completions.create(model=api.model, messages=HELLO), " hello you"
    )
    assert list(submit.token_ids) == CHAT_PROMPT
    assert submit.sampling.max_tokens == CONTEXT_LENGTH - len(CHAT_PROMPT)
    assert answer.id == f"chatcmpl-{submit.request_id}"
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " hello you")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(CHAT_PROMPT)


async def test_a_streamed_completion_has_exactly_these_bytes(api, wire):
    fields = {"prompt": "x", "stream": True, "max_tokens": 20}
    api.node.change_status(fingerprint="0123abcd")
    await wire.post(COMPLETIONS, fields, x_request_id="mine")
    submit = await api.node.submitted()
    number = submit.number
    api.node.say({number: ids(" one")})
    status, headers = await wire.head()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-request-id"] == "mine"
    assert headers["baton-request-id"] == submit.request_id
    chunks = wire.chunks()
    first = await anext(chunks)
    api.node.finish(number, ids(" two"))
    rest = b"".join([chunk async for chunk in chunks])
    created = sse_events(first + b"data: [DONE]\n\n")[0]["created"]
    envelope = (
        f'"id":"cmpl-{submit.request_id}","object":"text_completion","created":{created},'
        f'"model":"{api.model}"'
    )
    choice = '{"index":0,"text":"%s","finish_reason":%s,"logprobs":null}'
    event = 'data: {%s,"choices":[' + choice + '],"system_fingerprint":"fp_0123abcd"}\n\n'
    assert first.decode() == event % (envelope, " one", "null")
    assert rest.decode() == event % (envelope, " two", '"stop"') + "data: [DONE]\n\n"


@BOTH
async def test_a_batch_invariant_response_has_its_seed_and_fingerprint(api, wire, endpoint, asked):
    api.node.change_status(fingerprint="one", batch_invariant=True)
    for stream in (False, True):
        for given in (None, 5):
            seed = {} if given is None else {"seed": given}
            await wire.post(endpoint, {**asked, **seed, "stream": stream})
            submit = await api.node.submitted()
            api.node.finish(submit.number, ids(" one"))
            response = await wire.response()
            last = response.events[-1] if stream else response.json
            assert last["system_fingerprint"] == "fp_invariant_one"
            assert last["choices"][0]["seed"] == submit.sampling.seed
            assert given is None or submit.sampling.seed == given


@pytest.mark.parametrize(
    "endpoint, asked",
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 8}),
        ("/generate", {"text": "x"}),
    ],
)
@pytest.mark.parametrize("invariant", [True, False])
async def test_other_apis_return_the_seed_of_a_batch_invariant_response(
    api, endpoint, asked, invariant
):
    api.node.change_status(fingerprint="one", batch_invariant=invariant)
    submit, response = await api.answered(api.post(endpoint, **asked), " one")
    fields, name = response.json, "seed"
    if endpoint == "/generate":
        fields, name = fields["meta_info"], "sampling_seed"
    expected = submit.sampling.seed if invariant else None
    assert (expected is None) == (name not in fields) and fields.get(name) == expected


@pytest.mark.parametrize(
    "endpoint, asked, of_stream",
    [
        (COMPLETIONS, {"prompt": "x"}, lambda events: events[-1]),
        (CHAT, {"messages": HELLO}, lambda events: events[-1]),
        ("/v1/responses", {"input": "x"}, lambda events: events[-1]["response"]),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, lambda events: events[-2]["delta"]),
    ],
)
@pytest.mark.parametrize("updated", [False, True])
async def test_a_response_names_each_version_of_the_weights_of_its_tokens(
    api, wire, endpoint, asked, of_stream, updated
):
    old, new = {"system_fingerprint": "fp_old"}, {"system_fingerprint": "fp_new"}
    spans = [{"first_token": 0, **old}, {"first_token": len(ids(" one")), **new}]
    named = {**new, "system_fingerprints": spans} if updated else old

    async def answered(stream):
        api.node.change_status(fingerprint="old")
        await wire.post(endpoint, {**asked, "stream": stream})
        number = (await api.node.submitted()).number
        api.node.say({number: ids(" one")})
        for fingerprint in ("unused", "new") if updated else ():
            api.node.change_status(fingerprint=fingerprint)
        api.node.finish(number, ids(" two"))
        return await wire.response()

    def fingerprints(answer):
        (choice,) = answer.get("choices", [{}])
        return {name: each for name, each in (answer | choice).items() if "fingerprint" in name}

    assert fingerprints((await answered(False)).json) == named
    lines = (await answered(True)).body.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert fingerprints(of_stream(events)) == named
    if "choices" in events[0]:
        assert [fingerprints(each) for each in events] == [old, named]


@BOTH
async def test_token_ids_are_returned_if_requested(api, wire, endpoint, asked):
    """A piece without text has token ids, too, because the text of a partial character is
    unknown."""
    generated = ids(" one \u00e9 two")

    async def answered(stream):
        await wire.post(endpoint, {**asked, "stream": stream, "return_token_ids": True})
        submit = await api.node.submitted()
        for token in generated[:-1]:
            api.node.say({submit.number: [token]})
        api.node.finish(submit.number, generated[-1:])
        return list(submit.token_ids), await wire.response()

    prompt, response = await answered(False)
    whole = response.json
    (choice,) = whole["choices"]
    assert choice["token_ids"] == generated
    assert (choice if endpoint == COMPLETIONS else whole)["prompt_token_ids"] == prompt
    _, response = await answered(True)
    events = response.events
    assert [token for each in events for token in each["choices"][0]["token_ids"]] == generated
    reported = [each["choices"][0] if endpoint == COMPLETIONS else each for each in events]
    assert [each.get("prompt_token_ids") for each in reported] == [prompt] + [None] * (
        len(reported) - 1
    )


async def test_a_streamed_chat_has_the_role_once_and_the_usage_last(api, wire):
    await wire.post(
        CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    )
    number = (await api.node.submitted()).number
    api.node.say({number: ids(" one")})
    assert (await wire.head())[0] == 200
    chunks = wire.chunks()
    stream = await anext(chunks)
    api.node.finish(number, ids(" two"), FINISH_REASON_LENGTH, cached_tokens=3)
    stream += b"".join([chunk async for chunk in chunks])
    first, second, last = sse_events(stream)
    assert {e["object"] for e in (first, second, last)} == {"chat.completion.chunk"}
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": " one"},
            "finish_reason": None,
            "logprobs": None,
        }
    ]
    assert second["choices"] == [
        {"index": 0, "delta": {"content": " two"}, "finish_reason": "length", "logprobs": None}
    ]
    assert (first["usage"], second["usage"], last["choices"]) == (None, None, [])
    num_answer = len(ids(" one")) + len(ids(" two"))
    assert last["usage"] == {
        "prompt_tokens": len(CHAT_PROMPT),
        "completion_tokens": num_answer,
        "total_tokens": len(CHAT_PROMPT) + num_answer,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_a_streamed_completion_has_the_usage_last(api):
    asked = {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}}
    _, answer = await api.answered(api.post(COMPLETIONS, **asked), "one", cached_tokens=1)
    first, last = answer.events
    assert (first["choices"][0]["text"], first["usage"], last["choices"]) == ("one", None, [])
    assert last["usage"]["prompt_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("content", ["the fox", [{"type": "text", "text": "the fox"}]], ids=str)
async def test_a_prediction_is_sent_to_the_node_and_the_usage_counts_its_tokens(api, content):
    prediction: Any = {"type": "content", "content": content}
    asking = asyncio.create_task(
        api.client.chat.completions.create(
            model=api.model, messages=HELLO, prediction=prediction, n=2
        )
    )
    for _ in range(2):
        submit = await api.node.submitted()
        assert list(submit.prediction) == ids("the fox")
        number = submit.number
        # The end of the response cut off one of the correct tokens.
        api.node.finish(number, [20, 21], predicted={number: (3, 4)})
    usage = (await asking).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert usage.completion_tokens_details.rejected_prediction_tokens == 8


async def test_without_a_prediction_the_usage_has_no_counts_of_one(api):
    empty: Any = {"type": "content", "content": ""}
    for prediction in (None, empty):
        submit, answer = await api.answered(
            api.client.chat.completions.create(
                model=api.model, messages=HELLO, prediction=prediction
            )
        )
        usage = answer.usage
        assert not submit.prediction
        assert usage is not None and usage.completion_tokens_details is None


@pytest.mark.parametrize(
    "prediction, words",
    [
        ({"type": "content", "content": "x " * CONTEXT_LENGTH}, "prediction has"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "other", "content": "x"}, "prediction.type"),
        ("x", "prediction"),
    ],
    ids=["long", "image", "type", "text"],
)
async def test_an_invalid_prediction_is_rejected_by_name(api, prediction, words):
    answer = await api.post(CHAT, messages=HELLO, prediction=prediction)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]


async def test_a_partial_character_causes_no_event(api, wire):
    await wire.post(COMPLETIONS, {"prompt": "x", "stream": True})
    number = (await api.node.submitted()).number
    api.node.say({number: ids(" a")})
    await wire.head()
    chunks = wire.chunks()
    stream = await anext(chunks)
    for token in ids("\N{SNOWMAN}"):
        api.node.say({number: [token]})
    stream += await anext(chunks)
    api.node.finish(number)
    stream += b"".join([chunk async for chunk in chunks])
    texts = [event["choices"][0]["text"] for event in sse_events(stream)]
    assert texts == [" a", "\N{SNOWMAN}", ""]


async def test_tokens_that_arrive_together_are_one_event(api):
    _, answer = await api.ask(COMPLETIONS, " the quick brown fox", prompt="x", stream=True)
    (event,) = answer.events
    assert event["choices"][0]["text"] == " the quick brown fox"


@pytest.mark.parametrize("fields", [{"stop": "STOP"}, {"stop_regex": ["x", "(?i)s.o[op]"]}])
async def test_a_stop_string_ends_the_response_on_both_sides(api, fields):
    asking = asyncio.create_task(
        api.client.completions.create(model=api.model, prompt="x", extra_body=fields)
    )
    number = (await api.node.submitted()).number
    api.node.say({number: ids("one STOP two")})
    answer = await asking
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert await api.node.cancelled() == number


async def test_every_prompt_of_a_list_has_its_choices_in_order(api):
    asking = asyncio.create_task(
        api.client.completions.create(model=api.model, prompt=["a", "b c"], n=2, seed=7)
    )
    submits = [await api.node.submitted() for _ in range(4)]
    by_index = {submit.request_id.split("-")[1]: submit for submit in submits}
    assert len({submit.request_id.split("-")[0] for submit in submits}) == 1
    # Answered in another order than requested.
    for index in (2, 0, 3, 1):
        number = by_index[str(index)].number
        api.node.finish(number, ids(f"{index}"))
    answer = await asking
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["0", "1", "2", "3"]
    prompts = [list(by_index[str(index)].token_ids) for index in range(4)]
    assert prompts == [[0, *ids("a")]] * 2 + [[0, *ids("b c")]] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompts[0]) + len(prompts[2])
    assert answer.usage.completion_tokens == 4


async def test_choices_are_streamed_with_their_index(api):
    asking = asyncio.create_task(api.post(CHAT, messages=HELLO, n=2, stream=True))
    numbers = {s.request_id[-1]: s.number for s in [await api.node.submitted() for _ in "12"]}
    for index in "10":
        api.node.finish(numbers[index], ids(index))
    events = (await asking).events
    reported = {
        event["choices"][0]["index"]: event["choices"][0]["delta"]["content"] for event in events
    }
    assert reported == {0: "0", 1: "1"}


async def test_a_choice_that_fails_ends_the_others(api):
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x", n=2))
    one, other = [(await api.node.submitted()).number for _ in range(2)]
    api.node.finish(one, reason=FINISH_REASON_ERROR, error="broken", error_code=13)
    assert (await asking).status == 500
    assert await api.node.cancelled() == other
    await eventually(lambda: api.router.admission.num_live == 0)


async def test_a_client_that_disconnects_is_cancelled_on_the_node(api):
    async with connected(api.router.http_port) as wire:
        await wire.post(COMPLETIONS, {"prompt": "x"})
        number = (await api.node.submitted()).number
    assert await api.node.cancelled() == number
    await eventually(lambda: api.router.admission.num_live == 0)


async def test_a_client_that_leaves_its_stream_is_cancelled_on_the_node(api):
    asking = asyncio.create_task(
        api.client.completions.create(model=api.model, prompt="x", stream=True)
    )
    number = (await api.node.submitted()).number
    api.node.say({number: ids("a")})
    async with await asking as stream:
        await anext(aiter(stream))
    assert await api.node.cancelled() == number


async def test_unread_choices_do_not_keep_their_slots(tmp_path):
    """For any size of the buffers in between, and for any number of tokens in one piece."""
    model = write_model(tmp_path, context_length=2 * MANY_TOKENS)
    async with (
        api_for(model, slow_client_timeout_s=0.1) as api,
        not_reading(api.router.http_port) as wire,
    ):
        asked = {"prompt": "x", "n": 128, "max_tokens": MANY_TOKENS, "stream": True}
        await wire.post(COMPLETIONS, asked)
        numbers = [(await api.node.submitted()).number for _ in range(128)]

        async def talk() -> None:
            for _ in range(MANY_TOKENS - 1):
                api.node.say(dict.fromkeys(numbers, ids("x")))
                await asyncio.sleep(0.01)  # other tasks run

        talking = asyncio.create_task(talk())
        assert {await api.node.cancelled() for _ in numbers} == set(numbers)
        talking.cancel()
        await eventually(lambda: api.router.admission.num_live == 0)


async def test_requests_over_the_limit_are_429_with_retry_after(model):
    async with api_for(model, max_concurrent_requests=1, clients=AT_ONCE) as api:
        asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x"))
        number = (await api.node.submitted()).number
        with pytest.raises(openai.RateLimitError) as refusal:
            await api.client.completions.create(model=api.model, prompt="x")
        assert refusal.value.response.headers["retry-after"] == "1"
        assert refusal.value.type == "rate_limit_error"
        # One limit for both.
        rejected = await fails(api.grpc.generate("x"), StatusCode.RESOURCE_EXHAUSTED)
        assert dict(rejected.trailing_metadata() or ())["retry-after"] == "1"
        api.node.finish(number)
        assert (await asking).status == 200
        await api.ask(COMPLETIONS, prompt="x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "code, status",
    [
        (StatusCode.INVALID_ARGUMENT, 400),
        (StatusCode.RESOURCE_EXHAUSTED, 429),
        (StatusCode.INTERNAL, 500),
        (StatusCode.DATA_LOSS, 503),
        (StatusCode.DEADLINE_EXCEEDED, 504),
    ],
)
async def test_a_request_that_fails_on_its_node_has_the_right_status(api, code, status, stream):
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x", stream=stream))
    await api.node.complete(
        reason=FINISH_REASON_ERROR, error="no room for it", error_code=code.value[0]
    )
    answer = await asking
    assert (answer.status, answer.error["message"]) == (status, "no room for it")
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert (answer.headers.get("x-should-retry") == "false") == (status == 500)


async def test_an_aborted_request_is_not_retried_by_its_client(api):
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x"))
    await api.node.complete(reason=FINISH_REASON_ABORT)
    answer = await asking
    assert (answer.status, answer.error["type"]) == (499, "invalid_request_error")


async def test_a_stream_that_fails_midway_has_an_error_and_no_done(api):
    asking = asyncio.create_task(
        api.client.completions.create(model=api.model, prompt="x", stream=True)
    )
    number = (await api.node.submitted()).number
    api.node.say({number: ids("a")})
    stream = aiter(await asking)
    assert (await anext(stream)).choices[0].text == "a"
    api.node.finish(number, reason=FINISH_REASON_ERROR, error="node is gone", error_code=13)
    with pytest.raises(openai.APIError, match="node is gone"):
        await anext(stream)


async def test_without_a_usable_node_the_router_is_alive_but_not_ready(model):
    async with router_for(model, decode=["127.0.0.1:1"]) as (_, router):
        assert (await get(router.http_port, "/health")).status == 200
        ready = await get(router.http_port, "/ready")
        assert ready.status == 503
        assert ready.json["reason"] == "no decode node with a usable prefill node is ready"
        async with connected(router.http_port) as wire:
            await wire.post(COMPLETIONS, {"prompt": "x"})
            answer = await wire.response()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_readiness_is_lost_with_the_node(model, caplog):
    caplog.set_level(logging.INFO)
    async with api_for(model) as api:
        assert (await api.get("/ready")).json == {"status": "ready"}
        api.node.change_status(state="draining")
        await eventually(lambda: not api.router.cluster.ready)
        await eventually(lambda: f'not ready model={model} reason="no decode node' in caplog.text)
        reported = [each.getMessage() for each in caplog.records]
        assert reported.count(f"ready model={model}") == 1
        assert (await api.get("/ready")).status == 503
        assert (await api.get("/health")).status == 200


async def test_draining_completes_active_requests_and_accepts_no_new_one(api):
    call = api.grpc.generate("x")
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x"))
    numbers = [(await api.node.submitted()).number for _ in "12"]
    draining = asyncio.create_task(api.router.drain(WAIT_S, asyncio.Event()))
    await api.grpc.wait_until_serving(False)
    assert api.router.admission.leaving
    assert (await api.get("/ready")).json["reason"] == "the router is shutting down"
    assert (await api.get("/health")).status == 200
    assert (await api.post(COMPLETIONS, prompt="x")).status == 503
    await fails(api.grpc.generate("x"), StatusCode.UNAVAILABLE)
    assert not draining.done()
    for number in numbers:
        api.node.finish(number, ids("to the end"))
    assert (await asking).json["choices"][0]["text"] == "to the end"
    assert (await collect(call))[0] == "to the end"
    await draining


async def test_draining_ends_requests_that_do_not_complete_in_time(api):
    call = api.grpc.generate("x")
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x"))
    for _ in "12":
        await api.node.submitted()
    await api.router.drain(0.05, asyncio.Event())
    assert (await asking).status == 503
    await fails(call, StatusCode.UNAVAILABLE)
    await eventually(lambda: not api.node.streams)


async def test_an_alias_is_the_only_name_of_the_model(model):
    async with api_for(model, served_model_name="fox") as api:
        (listed,) = [model async for model in api.client.models.list()]
        assert listed.id == "fox"
        _, answer = await api.answered(api.client.completions.create(model="fox", prompt="x"))
        assert answer.model == "fox"
        with pytest.raises(openai.NotFoundError) as refusal:
            await api.client.completions.create(model=api.model, prompt="x")
        assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")


async def test_metrics_count_http_and_grpc_alike(api):
    await api.ask(COMPLETIONS, " the fox", prompt="x")
    await api.post(COMPLETIONS, prompt=[])
    await api.post(COMPLETIONS, prompt="x", max_tokens=0)
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.body.decode().splitlines()
    for line in (
        'baton_requests_total{outcome="stop"} 1.0',
        'baton_requests_rejected_total{reason="invalid"} 2.0',
        f"baton_generated_tokens_total {len(ids(' the fox')):.1f}",
        "baton_inflight_requests 0.0",
        "baton_time_to_first_token_seconds_count 1.0",
        f"baton_inter_token_latency_seconds_count {len(ids(' the fox')) - 1:.1f}",
        'baton_http_responses_total{status="200"} 1.0',
        'baton_http_responses_total{status="400"} 2.0',
    ):
        assert line in lines


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of_returns_the_likeliest_responses(api, logprobs):
    reported = {" one": -3.0, " two": -1.0, " three": -2.0}
    asked = {"prompt": ["x", "y"], "n": 2, "best_of": 3, "logprobs": logprobs}
    answering = asyncio.create_task(api.post(COMPLETIONS, **asked))
    for _ in range(2 * len(reported)):
        submit = await api.node.submitted()
        index = int(submit.request_id.rpartition("-")[2])
        text, logprob = list(reported.items())[index % len(reported)]
        number, tokens = submit.number, ids(text)
        assert submit.sampling.logprobs == 0
        api.node.finish(number, tokens, logprobs={number: [logprob] * len(tokens)})
    answer = (await answering).json
    choices = answer["choices"]
    assert [(each["index"], each["text"]) for each in choices] == [
        *((0, " two"), (1, " three")),
        *((2, " two"), (3, " three")),
    ]
    assert [each["logprobs"] is None for each in choices] == [logprobs is None] * 4
    num_tokens = 2 * sum(len(ids(text)) for text in reported)
    assert answer["usage"]["completion_tokens"] == num_tokens


async def test_best_of_one_requests_no_logprobs(api):
    for n in (None, 1):
        submit, answer = await api.ask(COMPLETIONS, prompt="x", best_of=1, n=n)
        assert not submit.sampling.HasField("logprobs") and answer.status == 200


async def test_the_logprobs_of_an_echoed_prompt_begin_at_the_requested_token(api):
    asked = {"prompt": [5, 6, 7, 8], "logprobs": 0, "echo": True, "prompt_logprobs_start": 2}
    answering = asyncio.create_task(api.post(COMPLETIONS, **asked))
    submit = await api.node.submitted()
    assert submit.sampling.prompt_logprobs_start == 2
    reported = RowLogprobs(request=submit.number, logprobs=Logprobs(logprob=[-0.5, -1.5]))
    api.node.send(FromNode(step=Step(prompt_logprobs=[reported])))
    api.node.finish(submit.number, [9], logprobs={submit.number: [-2.5]})
    logprobs = (await answering).json["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, None, -0.5, -1.5, -2.5]
    assert [each is None for each in logprobs["top_logprobs"]] == [True, True, False, False, False]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 5
