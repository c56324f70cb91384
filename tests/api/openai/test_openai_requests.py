"""Request fields of the OpenAI API: the resulting submission, and errors with the name of the
field."""

import asyncio
import gzip
import logging
from typing import Any

import pytest
from grpc import StatusCode

from api.dialect.ignored_fields import OF_COMPLETIONS
from api.openai.completions import CompletionFields
from api.requests.validation import WHOLE_INTERVAL
from protos.decode_pb2 import FINISH_REASON_ERROR
from tests.api.models import CONTEXT_LENGTH, VOCABULARY_SIZE, ids, write_model
from tests.api.rig import CHAT, COMPLETIONS, HELLO, Api, api_for
from tests.support.network.http_client import post, request
from tests.support.processes.stub_decode_node import Submission


async def _submitted(api: Api, path: str, **fields: Any) -> Submission:
    """Return the submission of a request that succeeds."""
    return (await api.ask(path, **fields))[0]


async def test_every_sampling_field_reaches_the_node(api):
    submit = await _submitted(
        api,
        COMPLETIONS,
        prompt="x",
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=99,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
    )
    sent = submit.sampling
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (5, 0.5, 0.25, 4)
    assert (sent.min_p, sent.seed, list(sent.stop_token_ids)) == (0.125, 99, [7, 8])
    assert sent.ignore_eos
    penalties = (sent.frequency_penalty, sent.presence_penalty, sent.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.5)


@pytest.mark.parametrize(
    "fields, interval",
    [
        ({"stream": True}, 4),  # the router's
        ({"stream": True, "stream_interval": 8, "stop": ["x"]}, 8),
        ({"stream_interval": 8}, WHOLE_INTERVAL),
        ({"stop": ["x"]}, 1),
        ({"stop_regex": ["x"]}, 1),
    ],
)
@pytest.mark.parametrize(
    "path, prompt", [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})]
)
async def test_the_node_groups_tokens_by_the_requested_stream_interval(
    model, path, prompt, fields, interval
):
    async with api_for(model, stream_interval=4) as api:
        assert (await _submitted(api, path, **prompt, **fields)).stream_interval == interval
        assert await api.refused(path, **prompt, stream_interval=0) == (400, "stream_interval")
        assert await api.refused(path, **prompt, stream_interval=1025) == (400, "stream_interval")


async def test_errors_name_invalid_keys_and_tokens(api):
    biased = await api.post(COMPLETIONS, prompt="x", logit_bias={"a": 1})
    assert biased.error["message"] == "logit_bias: invalid key: Expected `int`, got `str`"
    unknown = await api.post(COMPLETIONS, prompt=[1, VOCABULARY_SIZE])
    expected = f"prompt: token {VOCABULARY_SIZE} is outside the vocabulary of {VOCABULARY_SIZE}"
    assert unknown.error["message"] == f"{expected} tokens"


async def test_null_equals_an_absent_field(api):
    names = {*CompletionFields.__struct_fields__, *OF_COMPLETIONS}
    submit = await _submitted(api, COMPLETIONS, **{**dict.fromkeys(names), "prompt": "x"})
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (16, 1.0)
    assert submit.sampling.HasField("seed")


@pytest.mark.parametrize(
    "prompt, token_ids",
    [
        ("the fox", [[0, *ids("the fox")]]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["a", "b"], [[0, *ids("a")], [0, *ids("b")]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
    ids=["text", "token ids", "texts", "lists of token ids"],
)
async def test_a_prompt_has_four_formats(api, prompt, token_ids):
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt=prompt))
    submits = [await api.complete() for _ in token_ids]
    assert (await asking).status == 200
    by_index = sorted(submits, key=lambda submit: submit.request_id)
    assert [list(submit.token_ids) for submit in by_index] == token_ids


@pytest.mark.parametrize(
    "messages, text",
    [
        ([{"role": "user", "content": "hello"}], "[user] hello\n"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
            "[user] a\nb\n",
        ),
        (
            [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "c"}],
            "[system] d\n[assistant] c\n",
        ),
    ],
)
async def test_messages_are_rendered_into_the_prompt(api, messages, text):
    submit = await _submitted(api, CHAT, messages=messages)
    assert list(submit.token_ids) == [0, *ids(f"{text}[assistant]")]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
async def test_the_length_of_a_chat_response_has_two_field_names(api, fields, expected):
    submit = await _submitted(api, CHAT, messages=HELLO, **fields)
    assert submit.sampling.max_tokens == expected


async def test_the_first_of_several_choices_equals_a_single_one(api):
    alone = await _submitted(api, COMPLETIONS, prompt="x", seed=-3)
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt=["x", "y"], seed=-3, n=3))
    submits = [await api.complete() for _ in range(6)]
    assert (await asking).status == 200
    seeds = [s.sampling.seed for s in sorted(submits, key=lambda s: s.request_id)]
    assert seeds[0] == alone.sampling.seed == 2**64 - 3
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]  # whichever prompt it belongs to


async def test_unset_seeds_of_several_choices_differ(api):
    asking = asyncio.create_task(api.post(COMPLETIONS, prompt="x", n=3))
    submits = [await api.complete() for _ in range(3)]
    assert (await asking).status == 200
    assert len({submit.sampling.seed for submit in submits}) == 3


async def test_biases_bad_words_and_allowed_tokens_reach_the_node(api):
    submit = await _submitted(
        api,
        COMPLETIONS,
        prompt="x",
        max_tokens=9,
        min_tokens=5,
        logit_bias={"7": -100, "3": 1.5},
        allowed_token_ids=[3, 7],
        bad_words=["ab"],
    )
    sent = submit.sampling
    assert (sent.min_tokens, dict(sent.logit_bias)) == (5, {3: 1.5, 7: -100.0})
    assert list(sent.allowed_token_ids) == [3, 7]
    assert len(sent.bad_word_ids) == 2 and all(len(word.ids) for word in sent.bad_word_ids)


@pytest.mark.parametrize(
    "path, fields, field",
    [
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 45}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 60, "min_tokens": 45}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 64}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 64}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "min_tokens": 64}, "min_tokens"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 64}, "max_output_tokens"),
        (
            "/generate",
            {"input_ids": [5] * 20, "sampling_params": {"max_new_tokens": 45}},
            "sampling_params.max_new_tokens",
        ),
    ],
)
async def test_too_large_max_tokens_is_rejected_by_the_clients_field_name(api, path, fields, field):
    refused = await api.post(path, **fields)
    assert (refused.status, refused.error["param"]) == (400, field)
    assert "maximum context length is 64 tokens" in refused.error["message"]


@pytest.mark.parametrize(
    "path, fields",
    [
        (COMPLETIONS, {"prompt": [5] * 60}),
        (CHAT, {"messages": HELLO}),
        ("/v1/responses", {"input": "hello"}),
        ("/generate", {"input_ids": [5] * 60}),
        # Anthropic's clients must send it, and send a constant.
        ("/v1/messages", {"messages": HELLO, "max_tokens": 32_000}),
    ],
)
async def test_a_default_max_tokens_is_reduced_to_fit(api, path, fields):
    submit, _ = await api.ask(path, "done", **fields)
    assert len(submit.token_ids) + submit.sampling.max_tokens == CONTEXT_LENGTH


# Values of one field each, with a prompt.
WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "prompt": (None, [], ["a", 1], [[], []], [VOCABULARY_SIZE], [1] * CONTEXT_LENGTH, ["a"] * 129),
    "n": (0, 129),
    "max_tokens": (0, 2**31, "5", 5.5, True),
    "temperature": (-0.5, 1e300),
    "top_p": (0,),
    "top_k": (-2,),
    "min_p": (2,),
    "frequency_penalty": (3,),
    "presence_penalty": (-3,),
    "repetition_penalty": (0,),
    "seed": (0.5,),
    "stop": (["a"] * 17, "", ["x" * 1025]),
    "stop_token_ids": ([VOCABULARY_SIZE], [*range(17)]),
    "stop_regex": ("a(",),
    "stream": ("yes",),
    "min_tokens": (-1,),
    "allowed_token_ids": ([9999999],),
    "bad_words": ([""], ["x"] * 65, ["x" * 1025]),
    "logprobs": (21,),
    "echo": (1,),
    "prompt_logprobs_start": (-1,),
    "best_of": (0, 129),
    "logit_bias": ({"5": 101}, {"9999999": 1}, {"a": 1}),
    "suffix": ("y",),
    "use_beam_search": (True,),
    "skip_special_tokens": (False,),
    "add_special_tokens": (False,),
    "lora_path": (1,),
    "nobody_knows_this": (1,),
}


WRONG_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name, values in WRONG_VALUES.items() for value in values),
    ("prompt[0]", {"prompt": [1.5]}),
    ("prompt[0]", {"prompt": [-1]}),
    ("prompt", {"prompt": ["a"] * 65, "n": 2}),
    ("stop[0]", {"stop": [1]}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("stream_options.every", {"stream_options": {"every": 1}}),
    ("min_tokens", {"max_tokens": 2, "min_tokens": 3}),
    ("prompt_logprobs_start", {"logprobs": 1, "prompt_logprobs_start": 1}),
    ("prompt_logprobs_start", {"logprobs": 1, "echo": True, "prompt_logprobs_start": 9}),
    ("best_of", {"best_of": 2, "stream": True}),
    ("best_of", {"best_of": 2, "n": 3}),
]


async def test_a_wrong_field_of_a_completion_is_rejected_by_name(api):
    for param, fields in WRONG_FIELDS:
        answer = await api.post(COMPLETIONS, **{"prompt": "x", **fields})
        assert (answer.status, answer.error["param"]) == (400, param), (fields, answer.body)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"].startswith(param.partition("[")[0].partition(".")[0])
        assert api.router.admission.num_live == 0
    assert not any(message.submits for message in api.node.received)


async def test_a_prompt_is_required_and_may_be_an_empty_text(api):
    assert await api.refused(COMPLETIONS) == (400, "prompt")
    await _submitted(api, COMPLETIONS, prompt="")  # special tokens alone


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template says so
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "x"}}, "response_format.type"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages",  # for which this template has no place
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


async def test_a_wrong_field_of_a_chat_is_rejected_by_name(api):
    for fields, param in WRONG_CHATS:
        answer = await api.post(CHAT, **{"messages": HELLO, **fields})
        assert answer.status == 400, (fields, answer.body)
        assert answer.error["param"].startswith(param), fields
    assert not any(message.submits for message in api.node.received)


async def test_a_model_without_a_template_supports_completions_but_no_chat(tmp_path):
    async with api_for(write_model(tmp_path)) as api:
        answer = await api.post(CHAT, messages=HELLO)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "no chat template" in answer.error["message"]
        await _submitted(api, COMPLETIONS, prompt="x")


NO_REQUESTS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x"} and more',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00"}',
    b'{"prompt": "x", "seed": ' + b"9" * 10000 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 30 + b"}",
    b'{"prompt": "x", "nested": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": ' + b"[" * 50_000 + b"}",
)


async def test_an_invalid_body_is_400(api, wire):
    for body in NO_REQUESTS:
        for path in (COMPLETIONS, CHAT):
            await wire.send(request("POST", path, body))
            answer = await wire.response()
            reported = answer.status, answer.error["type"]
            assert reported == (400, "invalid_request_error"), body[:40]


async def test_a_large_prompt_is_not_multiplied_without_limit(api):
    answer = await api.post(COMPLETIONS, prompt="x" * 200_000, n=100)
    assert (answer.status, answer.error["param"]) == (413, "n")
    answer = await api.post(COMPLETIONS, prompt="x" * 200_000)
    assert (answer.status, answer.error["param"]) == (400, "prompt")  # longer than the context


async def test_only_json_is_accepted(api, wire):
    await wire.post(COMPLETIONS, {"prompt": "x"}, content_type="text/plain")
    assert (await wire.response()).status == 415
    await wire.post(COMPLETIONS, {"prompt": "x"}, content_type="application/JSON; charset=UTF-8")
    await api.complete()
    assert (await wire.response()).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "x" * 5000], ids=["gzip", "long"])
async def test_a_compressed_body_is_rejected_with_a_remedy(api, wire, encoding):
    """Seen failing: 400, the body is not valid JSON. Decompressed, it could be a thousand times
    as large."""
    body = gzip.compress(b'{"prompt": "x"}')
    await wire.post(COMPLETIONS, body, content_encoding=encoding)
    answer = await wire.response()
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    assert "send it uncompressed" in answer.error["message"] and len(answer.body) < 300
    await wire.post(COMPLETIONS, {"prompt": "x"}, content_encoding="identity")
    await api.complete()
    assert (await wire.response()).status == 200


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ],
    ids=["format", "guided", "tools"],
)
async def test_a_grammar_that_nodes_reject_has_the_clients_field_name_in_the_error(
    talking, fields, name
):
    """Seen failing: json_schema or structural_tag, which the client had not sent."""
    asking = asyncio.create_task(talking.post(CHAT, messages=HELLO, **fields))
    submit = await talking.node.submitted()
    kind = submit.sampling.guide.WhichOneof("form")
    talking.node.finish(
        submit.number,
        reason=FINISH_REASON_ERROR,
        error=f"sampling.{kind}: #: not cannot be enforced",
        error_code=StatusCode.INVALID_ARGUMENT.value[0],
    )
    answer = await asking
    assert answer.status == 400 and answer.error["param"].startswith(name), answer.body
    assert answer.error["message"].startswith(f"{answer.error['param']}: #: not cannot")


async def test_too_long_a_request_id_is_400_and_a_repeated_one_is_accepted(api, wire):
    await wire.post(COMPLETIONS, {"prompt": "x"}, x_request_id="x" * 257)
    answer = await wire.response()
    assert (answer.status, "request_id" in answer.error["message"]) == (400, True)
    await wire.post(COMPLETIONS, {"prompt": "x"}, x_request_id="same")
    port = api.router.http_port
    again = post(port, COMPLETIONS, {"prompt": "x"}, x_request_id="same")
    asking = asyncio.create_task(again)
    for _ in range(2):
        await api.complete()
    for each in (await wire.response(), await asking):
        assert (each.status, each.headers["x-request-id"]) == (200, "same")


async def test_the_log_of_rejected_requests_is_limited(model, caplog):
    caplog.set_level(logging.INFO)
    async with api_for(model) as api:
        for _ in range(30):
            assert (await api.post(COMPLETIONS)).status == 400  # because of its fields
            assert (await api.post(COMPLETIONS, prompt="x", max_tokens=-1)).status == 400
    lines = [line for line in caplog.messages if line.startswith("request rejected")]
    assert len(lines) == 20
