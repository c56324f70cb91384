"""/generate with requests of SGLang's clients."""

import asyncio
from unittest.mock import Mock

from grpc import StatusCode

from api.dialect import generation_endpoint
from api.dialect.generation_endpoint import DialectReader, HttpReply, RequestOrigin
from api.native.generate import NATIVE
from api.parsers.model_format import ModelFormat
from api.requests.answer import FinalChunk, OutputChunk, TokenUsage
from protos.decode_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.api.models import ids
from tests.support.network.http_client import sse_events

GENERATE = "/generate"


async def test_a_text_gets_the_generated_text_and_token_counts(api):
    sampling = {"max_new_tokens": 8, "temperature": 0, "sampling_seed": 5, "stop": ["x"]}
    submit, answer = await api.answered(
        api.post(GENERATE, text="the fox", sampling_params=sampling, rid="mine"),
        " jumps",
        cached_tokens=1,
    )
    reported = answer.json
    assert list(submit.token_ids) == [0, *ids("the fox")]
    sent = submit.sampling
    assert (sent.max_tokens, sent.temperature, sent.seed) == (8, 0.0, 5)
    assert (reported["text"], reported["output_ids"]) == (" jumps", ids(" jumps"))
    meta = reported["meta_info"]
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (len(submit.token_ids), 1)
    assert meta["completion_tokens"] == len(ids(" jumps"))
    assert meta["id"] == submit.request_id and meta["e2e_latency"] > 0


async def test_a_response_has_the_weight_versions_of_its_tokens(api):
    old, new = b"o" * 16, b"n" * 16
    api.node.change_status(weights=old)
    asking = asyncio.create_task(api.post(GENERATE, text="x"))
    number = (await api.node.submitted()).number
    api.node.say({number: ids(" one")})
    api.node.change_status(weights=new)
    api.node.finish(number, ids(" two"))
    meta = (await asking).json["meta_info"]
    assert meta["weight_version"] == new.hex()
    assert meta["weight_versions"] == [
        {"first_token": 0, "weight_version": old.hex()},
        {"first_token": len(ids(" one")), "weight_version": new.hex()},
    ]


async def test_every_event_of_a_stream_has_the_whole_text_so_far(api, wire):
    # Like the requests of `sglang.bench_serving --backend sglang`.
    await wire.post(
        GENERATE,
        {
            "input_ids": [5, 6],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True},
            "stream": True,
            "lora_path": None,
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
        },
    )
    number = (await api.node.submitted()).number
    api.node.say({number: ids(" one")})
    assert (await wire.head())[0] == 200
    chunks = wire.chunks()
    stream = await anext(chunks)
    api.node.finish(number, ids(" two"), FINISH_REASON_LENGTH)
    stream += b"".join([chunk async for chunk in chunks])
    first, last = sse_events(stream)
    assert (first["text"], last["text"]) == (" one", " one two")
    num = len(ids(" one")), len(ids(" one")) + len(ids(" two"))
    assert first["meta_info"]["finish_reason"] is None
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": num[1]}
    counted = [each["meta_info"]["completion_tokens"] for each in (first, last)]
    assert counted == list(num)
    assert first["meta_info"]["prompt_tokens"] == 2


async def test_the_size_of_a_stream_is_limited_by_the_length_of_its_response(monkeypatch):
    """If each event had the whole text so far, n tokens would be n² of text."""
    written: list[bytes] = []
    stream = Mock(slow=False, push=written.append, finish=written.append)
    monkeypatch.setattr(generation_endpoint, "HttpStream", lambda request, kind, headers: stream)
    reader = DialectReader(NATIVE, ModelFormat(), ignore_unknown=False)
    asked = reader.read(b'{"text": "x", "stream": true}', [])
    content = asked.content(RequestOrigin.now("id", "model"))
    reply = HttpReply(content, 1, Mock(), (), stream=True)
    num = 4000
    for _ in range(num):
        assert reply.offer(0, OutputChunk("word ", (7,)))
    usage = TokenUsage(1, num, 0)
    await reply.write(0, FinalChunk("end", (8,), "stop", None, usage, 0))
    reported = sse_events(b"".join(written))
    assert reported[-1]["text"] == "word " * num + "end"
    texts = [len(each["text"]) for each in reported]
    assert texts == sorted(set(texts)) and texts[:100] == list(range(5, 505, 5))
    assert all(
        len(each["output_ids"]) == n // 5 for each, n in zip(reported[:-1], texts, strict=False)
    )
    assert sum(texts) < 150 * texts[-1]


async def test_a_list_of_prompts_gives_a_list_of_responses(api):
    asking = asyncio.create_task(api.post(GENERATE, input_ids=[[5], [6, 7]]))
    texts = {}
    for _ in range(2):
        submit = await api.node.submitted()
        texts[tuple(submit.token_ids)] = submit
    for (first, *_), submit in texts.items():
        ended = {submit.number: FINISH_REASON_STOP}
        api.node.say({submit.number: ids(f" {first}")}, ended=ended)
    assert [each["text"] for each in (await asking).json] == [" 5", " 6"]


WRONG = [
    ({}, "text"),
    ({"text": "x", "input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"input_ids": [1, [2]]}, "text"),
    ({"input_ids": [1 << 20]}, "input_ids"),
    ({"text": ["x"] * 129}, "text"),
    ({"text": ["x"] * 65, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"text": "x", "top_logprobs_num": 21}, "top_logprobs_num"),
    (
        {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 2},
        "logprob_start_len",
    ),
    ({"text": "x", "token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"text": "x", "image_data": "data:"}, "image_data"),
    ({"text": "x", "lora_path": 1}, "lora_path"),
    (
        {"text": "x", "sampling_params": {"skip_special_tokens": False}},
        "sampling_params.skip_special_tokens",
    ),
    ({"text": "x", "sampling_params": {"max_new_token": 5}}, "sampling_params.max_new_token"),
]


async def test_invalid_fields_are_rejected_by_name(api):
    for fields, param in WRONG:
        assert await api.refused(GENERATE, **fields) == (400, param)


# Seen failing: errors had the names of the gRPC API, and no param.
WRONG_SAMPLING = [
    ({"top_p": 2}, "top_p"),
    ({"max_new_tokens": 1 << 20}, "max_new_tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop_regex": ["a", "("]}, "stop_regex"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"regex": "x" * (65 << 10)}, "regex"),
    ({"ebnf": "x" * (65 << 10)}, "ebnf"),
    ({"json_schema": "{}", "regex": "x"}, "json_schema"),
]


async def test_a_wrong_sampling_field_has_the_clients_name_in_the_error(api):
    for sampling, name in WRONG_SAMPLING:
        answer = await api.post(GENERATE, text="x", sampling_params=sampling)
        field = f"sampling_params.{name}"
        assert (answer.status, answer.error["param"]) == (400, field), answer.body
        assert answer.error["message"].startswith(field)


async def test_a_grammar_that_a_node_rejects_has_the_clients_name_in_the_error(api):
    asking = asyncio.create_task(
        api.post(GENERATE, text="x", sampling_params={"json_schema": '{"type": 3}'})
    )
    await api.node.complete(
        reason=FINISH_REASON_ERROR,
        error="sampling.guide: it has no such type",
        error_code=StatusCode.INVALID_ARGUMENT.value[0],
    )
    answer = await asking
    assert (answer.status, answer.error["param"]) == (400, "sampling_params.json_schema")
