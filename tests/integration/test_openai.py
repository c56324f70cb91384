"""The OpenAI API through real processes, with OpenAI's own client. Responses equal those over
gRPC."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch

from tests.support.models.checkpoints import reference_model
from tests.support.network.http_client import post
from tests.support.processes.cluster import RIGS, Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_TOKENS = 24
NUM_CONCURRENT = 64
NAME = "demo"
GREEDY: dict[str, Any] = {"model": NAME, "max_tokens": NUM_TOKENS, "temperature": 0}
WHOLE: dict[str, Any] = {**GREEDY, "extra_body": {"ignore_eos": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RIGS)
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> AsyncIterator[Cluster]:
    flags = (f"--served-model-name={NAME}",)
    logs = tmp_path_factory.mktemp("logs")
    async with Cluster(model, logs, rig=request.param, router_flags=flags) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{cluster.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _nothing_stays(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.until_nothing_is_held()


def _prompts(count: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(source.randint(1, 200))] for _ in range(count)]


async def _streamed(client: openai.AsyncOpenAI, prompt: object, **fields: Any) -> tuple[str, Any]:
    """Return text and usage."""
    texts, usage = [], None
    fields = {**WHOLE, "stream_options": {"include_usage": True}, **fields}
    async with await client.completions.create(
        prompt=prompt,  # type: ignore[arg-type]
        stream=True,
        **fields,
    ) as stream:
        async for chunk in stream:
            texts += [choice.text for choice in chunk.choices]
            usage = chunk.usage or usage
    return "".join(texts), usage


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}], ids=str)
async def test_a_completion_equals_that_over_grpc(
    cluster: Cluster, client: openai.AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    for prompt in ("Once upon a time", *_prompts(3)):
        parsed = await cluster.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
        whole = await client.completions.create(prompt=prompt, **{**WHOLE, **sampling})
        (choice,) = whole.choices
        assert (choice.text, choice.finish_reason) == (parsed.text, parsed.finish_reason)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == parsed.usage.prompt_tokens
        assert whole.usage.completion_tokens == NUM_TOKENS
        text, usage = await _streamed(client, prompt, **sampling)
        assert (text, usage.completion_tokens) == (parsed.text, NUM_TOKENS)


async def test_a_chat_response_is_the_same_streamed_and_not(client: openai.AsyncOpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
    ]
    whole = await client.chat.completions.create(messages=messages, **WHOLE)
    text = ""
    async for chunk in await client.chat.completions.create(
        messages=messages, stream=True, **WHOLE
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"


async def test_loglikelihoods_as_lm_eval_requests_them_are_those_of_transformers(
    cluster: Cluster, model: Path
) -> None:
    """Like its `local-completions`: the last token belongs to the response and is ignored."""
    reference = reference_model(model)
    asked = [(prompt[:-5], prompt[-5:]) for prompt in _prompts(6) if len(prompt) > 6]
    for max_tokens in (1, 0):
        body = {
            "model": NAME,
            "prompt": [[*context, *end] for context, end in asked],
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = (await post(cluster.http_port, "/v1/completions", body)).json
        last = -1 if max_tokens else None
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            context, end = asked[choice["index"]]
            with torch.inference_mode():
                logits = reference(torch.tensor([[*context, *end]])).logits[0, len(context) - 1 :]
            rows = logits[:-1].float().log_softmax(dim=-1)
            parsed = choice["logprobs"]["token_logprobs"][len(context) : last]
            top = choice["logprobs"]["top_logprobs"][len(context) : last]
            expected = rows[range(5), end].tolist()
            assert parsed == pytest.approx(expected, abs=1e-4)
            greedy = [one == max(likely.values()) for one, likely in zip(parsed, top, strict=True)]
            assert greedy == (rows.argmax(dim=-1) == torch.tensor(end)).tolist()
            assert choice["logprobs"]["token_logprobs"][0] is None
        assert answer["usage"]["completion_tokens"] == max_tokens * len(asked)


async def test_logprobs_are_the_same_streamed_and_not(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello?"}]
    fields = {"logprobs": True, "top_logprobs": 2, **WHOLE}
    whole = await client.chat.completions.create(messages=messages, **fields)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == NUM_TOKENS
    assert "".join(token.token for token in logprobs.content) == whole.choices[0].message.content
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert bytes(token.bytes or ()).decode() == token.token
        assert len(token.top_logprobs) == 2
    streamed = []
    async for chunk in await client.chat.completions.create(
        messages=messages, stream=True, **fields
    ):
        parsed = chunk.choices[0].logprobs
        streamed += parsed.content or [] if parsed else []
    assert streamed == logprobs.content
    echoed = await client.completions.create(prompt="Once upon", echo=True, logprobs=0, **WHOLE)
    (choice,) = echoed.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.text.startswith("Once upon")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))  # each is a byte


async def test_options_apply_to_tokens_and_the_finish_reason_is_reported(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    allowed = [65, 66, 67]
    fields = {**GREEDY, "extra_body": {"ignore_eos": True, "allowed_token_ids": allowed}}
    (only,) = (await client.completions.create(prompt="x", **fields)).choices
    parsed = await cluster.generate("x", max_tokens=NUM_TOKENS, ignore_eos=True)
    assert only.text != parsed.text and len(set(only.text)) <= 3
    biased = await client.completions.create(prompt="x", logit_bias={"66": 100}, **WHOLE)
    assert len(set(biased.choices[0].text)) == 1
    word = parsed.text[3:5]
    body = {"ignore_eos": True, "bad_words": [word]}
    without = await client.completions.create(prompt="x", **{**GREEDY, "extra_body": body})
    assert word not in without.choices[0].text and len(without.choices[0].text) == NUM_TOKENS
    body = {"ignore_eos": True, "stop_token_ids": [parsed.token_ids[4]], "min_tokens": 2}
    ended = await client.completions.create(prompt="x", **{**GREEDY, "extra_body": body})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].stop_reason == parsed.token_ids[4]  # type: ignore[attr-defined]


async def test_a_response_follows_its_schema_and_an_invalid_schema_is_rejected_by_name(
    client: openai.AsyncOpenAI,
) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "word": {"enum": ["a", "b"]}},
        "required": ["sum", "word"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "Hello?"}]
    fields = {**GREEDY, "max_tokens": 200}

    async def parsed(form: dict[str, Any], **more: Any) -> Any:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
        answer = await client.chat.completions.create(
            messages=messages, response_format=wanted, **{**fields, **more}
        )
        assert answer.choices[0].finish_reason == "stop"
        return json.loads(answer.choices[0].message.content or "")

    answers = await asyncio.gather(*(parsed(schema, temperature=1.0, seed=n) for n in range(6)))
    for answer in answers:
        assert isinstance(answer["sum"], int) and answer["word"] in ("a", "b")
    choice = await client.completions.create(
        prompt="x", **{**fields, "extra_body": {"guided_choice": ["yes", "no"]}}
    )
    assert choice.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as refusal:
        await parsed({"type": "nonsense"})
    assert "nonsense" in refusal.value.message


async def test_a_prompt_too_large_for_every_node_is_rejected_in_openais_format(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(prompt=[1] * 9000, **GREEDY)
    assert refusal.value.param == "prompt"
    answer = await post(cluster.http_port, "/v1/completions", {"prompt": "x", "top_p": 7})
    assert (answer.status, answer.error["param"]) == (400, "top_p")
