"""No field is dropped silently: it is supported, rejected by name, or changes no response."""

import json
from typing import Any

import pytest

from api.dialect.generation_endpoint import DialectReader, EndpointCall
from api.dialect.problems import ApiError
from api.openai import chat, completions
from api.parsers.model_format import ModelFormat
from api.requests.generate_params import ChatPrompt, ChatTurn
from tests.api.rig import CHAT, api_for

COMPLETIONS = DialectReader(completions.COMPLETIONS, ModelFormat(), ignore_unknown=False)
CHATS = DialectReader(chat.CHAT, ModelFormat(), ignore_unknown=False)
PROMPT: dict[str, Any] = {"prompt": "x"}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
DIALECTS = pytest.mark.parametrize(
    "dialect, prompt", [(COMPLETIONS, PROMPT), (CHATS, HELLO)], ids=["completions", "chats"]
)

# Fields that other servers support, and this one does not.
ASKED_IN_VAIN: dict[str, Any] = {
    "custom_logit_processor": "x",
    "detokenize": False,
    "grammar": "root ::= x",
    "images": ["data:"],
    "length_penalty": 1.5,
    "logprob_token_ids": [1],
    "typical_p": 0.5,
}

# Fields whose value never changes the response.
CHANGES_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "detokenize": True,
    "frequency_penalty": 0,
    "images": [],
    "length_penalty": 1.0,
    "metadata": {"a": ["b"]},
    "n": 1,
    "no_such_field": None,
    "nor_this": [],
    "nor_that": "",
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "priority": 0,
    "prompt_cache_key": "k",
    "response_format": {"type": "text", "json_schema": None},
    "safety_identifier": "s",
    "service_tier": "auto",
    "skip_special_tokens": True,
    "store": True,
    "stream_interval": 1,
    "stream_options": {"include_obfuscation": False, "continuous_usage_stats": True, "x": None},
    "structural_tag": "",
    "top_k": 0,
    "typical_p": 1.0,
    "user": "u",
}

ANSWERED = {  # fields of a response that a client sends back
    "role": "assistant",
    "content": "ho",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
# The fields and values of OpenAI's client, langchain, litellm, lm_eval, guidellm, aiperf and the
# benchmarks of vLLM and SGLang.
OF_CLIENTS: dict[str, Any] = {
    "temperature": 0.0,
    "n": 1,
    "seed": 1234,
    "logit_bias": {},
    "ignore_eos": True,
    "top_k": 10,
    "min_p": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
CHAT_OF_CLIENTS: dict[str, Any] = {
    **OF_CLIENTS,
    "messages": [
        {"role": "system", "content": "s", "name": "x"},
        {"role": "user", "name": "", "content": "hi"},
        ANSWERED,
        {**ANSWERED, "provider_specific_fields": {"citations": None}},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        },
    ],
    "modalities": ["text"],
    "metadata": {"tags": ["a"]},
    "store": False,
    "reasoning_effort": None,
    "verbosity": "medium",
    "logprobs": False,
    "top_logprobs": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "max_completion_tokens": 8,
    "min_tokens": 0,
    "lora_path": None,
    "user": "u",
}
COMPLETION_OF_CLIENTS: dict[str, Any] = {
    **OF_CLIENTS,
    **PROMPT,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "max_tokens": 256,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
}


def read(
    dialect: DialectReader[Any], *, ignored: list[str] | None = None, **fields: Any
) -> EndpointCall:
    return dialect.read(json.dumps(fields).encode(), [] if ignored is None else ignored)


def refused(dialect: DialectReader[Any], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(dialect, **fields)
    assert (caught.value.status, caught.value.code) == (400, "unsupported")
    return caught.value


@DIALECTS
@pytest.mark.parametrize("name", ASKED_IN_VAIN)
def test_unsupported_fields_are_rejected_by_name(dialect, prompt, name):
    refusal = refused(dialect, **prompt, **{name: ASKED_IN_VAIN[name]})
    assert refusal.param == name
    assert str(refusal) == f"{name} is not supported by this server"


@DIALECTS
@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_fields_that_change_no_response_are_accepted(dialect, prompt, name):
    seeded = {**prompt, "seed": 1}
    taken = read(dialect, **seeded, **{name: CHANGES_NOTHING[name]})
    assert taken.requests[0].sampling == read(dialect, **seeded).requests[0].sampling


@pytest.mark.parametrize("stop", [None, ["\n", "Q:"]])
@pytest.mark.parametrize(
    "dialect, fields", [(CHATS, CHAT_OF_CLIENTS), (COMPLETIONS, COMPLETION_OF_CLIENTS)]
)
def test_fields_of_common_clients_are_accepted(dialect, fields, stop):
    assert len(read(dialect, **fields, stop=stop).requests) == 1


@pytest.mark.parametrize(
    "message, path",
    [
        ({"role": "user", "content": "x", "prefix": True}, "prefix"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "refusal"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}", "strict": True}}],
            },
            "tool_calls[0].function.strict",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": "data:", "size": 3}},
                ],
            },
            "content[1].image_url.size",
        ),
    ],
    ids=str,
)
def test_unsupported_fields_of_a_message_are_rejected_by_their_path(message, path):
    refusal = refused(CHATS, messages=[*HELLO["messages"], message])
    assert refusal.param == f"messages[1].{path}"
    assert str(refusal).startswith(f"messages[1].{path}")


def test_all_unsupported_fields_are_named_at_once():
    refusal = refused(
        COMPLETIONS,
        **PROMPT,
        stream_options={"every": 5},
        typical_p=2,
        length_penalty=2,
        mirostat=2,
    )
    assert refusal.param == "stream_options.every"
    assert str(refusal) == (
        "stream_options.every, typical_p, length_penalty and mirostat are not supported by this "
        "server"
    )


def test_a_thousand_long_field_names_give_a_short_sentence():
    refusal = refused(COMPLETIONS, **PROMPT, **{f"{'q' * 1000}{n}": n for n in range(1, 1001)})
    assert len(str(refusal)) < 600
    assert str(refusal).count("qqq,") == 7 and "qqq and others are not" in str(refusal)
    assert len(refusal.body) < 1000


@pytest.mark.parametrize(
    "fields, meant",
    [
        ({"max_token": 5}, "max_tokens"),
        ({"maxTokens": 5}, "max_tokens"),
        ({"max_new_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"temprature": 0}, "temperature"),
        ({"stop_token_id": 0}, "stop_token_ids"),
        ({"stream_options": {"include_usages": True}}, "include_usage"),
    ],
    ids=str,
)
def test_a_misspelt_name_gets_a_suggestion(fields, meant):
    assert f"(did you mean {meant}?)" in str(refused(COMPLETIONS, **PROMPT, **fields))


def test_a_field_with_a_neutral_value_changes_nothing():
    messages = [
        {"role": "user", "content": "hi", "name": "ada", "mood": None},
        {"role": "assistant", "content": [{"type": "text", "text": "ho", "mood": []}]},
    ]
    asked = read(CHATS, messages=messages, max_tokens=7, nothing=None, user="ada")
    prompt = asked.requests[0].prompt.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [*prompt.turns] == [ChatTurn("user", "hi", "ada"), ChatTurn("assistant", "ho")]
    assert (asked.requests[0].sampling.max_tokens, asked.session_id) == (7, "ada")
    with pytest.raises(ApiError, match=r"^max_tokens: Expected `int") as caught:
        read(CHATS, messages=messages, max_tokens="7", nothing=None)
    assert caught.value.param == "max_tokens"


def test_unknown_and_unsupported_fields_can_be_ignored_and_are_reported():
    lenient = DialectReader(chat.CHAT, ModelFormat(), ignore_unknown=True)
    ignored: list[str] = []
    message = {"role": "user", "content": "hi", "mood": "good", "audio": {"id": "a"}}
    asked = read(
        lenient,
        ignored=ignored,
        messages=[message],
        mirostat=2,
        stream_options={"every": 5},
        user="ada",
        typical_p=0.5,
        nothing=None,
        metadata={"a": "b"},
    )
    assert asked.session_id == "ada"
    assert {*ignored} == {
        "messages[0].mood",
        "messages[0].audio",
        "mirostat",
        "stream_options.every",
        "typical_p",
    }
    with pytest.raises(ApiError, match="user: Expected `str"):
        read(lenient, messages=[message], user=5)


HINTS: dict[str, Any] = {
    "guided_decoding_backend": "xgrammar",
    "reasoning_effort": "high",
    "verbosity": "low",
}


@pytest.mark.parametrize("name", HINTS)
def test_ignored_hints_are_reported_by_name(name):
    """Seen failing: 400, also with --ignore-unknown-fields."""
    ignored: list[str] = []
    asked = read(CHATS, ignored=ignored, **HELLO, seed=1, **{name: HINTS[name]})
    assert ignored == [name]
    (wanted,), (plain,) = asked.requests, read(CHATS, **HELLO, seed=1).requests
    assert (wanted.sampling, wanted.prompt.prompt) == (plain.sampling, plain.prompt.prompt)
    assert refused(CHATS, **HELLO, typical_p=0.5, **{name: HINTS[name]}).param == "typical_p"


async def test_a_header_names_the_ignored_fields(model):
    """For any number of fields and any content of their names."""
    async with api_for(model, ignore_unknown_fields=True) as api:
        for fields, named in (
            ({}, None),
            ({"verbosity": "low", "x": 1}, "verbosity, x"),
            ({"a\r\nb: ü": 1}, "a??b???"),
            (
                {f"x{n:02}": 1 for n in range(99)},
                f"{', '.join(f'x{n:02}' for n in range(16))}, ...",
            ),
        ):
            _, answer = await api.ask(CHAT, **HELLO, **fields)
            assert answer.headers.get("baton-ignored-fields") == named
        refused = await api.post(CHAT, **HELLO, verbosity="low", n=0)
        assert (refused.status, refused.error["param"]) == (400, "n")
        reported = await api.post("/tokenize", prompt="x", x=1)
        assert (reported.status, reported.headers["baton-ignored-fields"]) == (200, "x")
