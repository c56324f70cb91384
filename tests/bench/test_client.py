"""The client of `baton bench`: its outcome for every kind of response of a stub server."""

import time
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from bench.errors import InvalidInput, UnusableRun
from bench.traffic.openai_client import OpenAiClient, base_url
from bench.traffic.workload import WorkloadRequest
from tests.bench.stub_openai import Script, stub_openai

JOB = WorkloadRequest((5, 6, 7, 8), max_tokens=6)


@asynccontextmanager
async def _client(url, **options):
    client = OpenAiClient(base_url(url), **{"send": "ids", "timeout_s": 20.0, **options})
    try:
        await client.choose_model()
        yield client
    finally:
        await client.close()


async def _ask(script, **options):
    """Return the outcome of one request that was due now, and the server's record of it."""
    async with stub_openai(lambda _: script) as stub, _client(stub.url, **options) as client:
        start = time.perf_counter()
        outcome = await client.ask(JOB, start, 0.0)
        return outcome, stub.seen[0], start


async def test_every_event_has_its_time_and_usage_counts_the_tokens():
    script = Script(chunks=(1, 2, 3), first_s=0.05, gap_s=0.03)
    outcome, seen, start = await _ask(script)
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.output_tokens) == (4, 6)
    wrote = [time - start for time in seen.wrote]
    for came, sent in zip(outcome.chunks, wrote, strict=True):
        assert sent <= came <= sent + 5.0
    assert outcome.ttft >= 0.05
    assert outcome.gaps == [b - a for a, b in pairwise(outcome.chunks)]
    assert outcome.e2e >= outcome.chunks[-1]


async def test_usage_in_every_event_is_used():
    outcome, _, _ = await _ask(Script(chunks=(2, 1, 3), usage_in_chunks=True, gap_s=0.01))
    assert outcome.chunk_tokens == [2, 1, 3]
    assert outcome.per_token == pytest.approx((outcome.chunks[2] - outcome.chunks[0]) / 4)


async def test_without_usage_an_event_counts_as_one_token_and_the_outcome_says_so():
    outcome, _, _ = await _ask(Script(chunks=(2, 3), usage=False))
    assert (outcome.output_tokens, outcome.usage_reported, outcome.error) == (2, False, "")


async def test_the_role_that_starts_a_chat_is_no_token():
    outcome, seen, _ = await _ask(Script(chunks=(1, 1), first_s=0.05), send="chat")
    assert seen.path == "/v1/chat/completions"
    assert [message["role"] for message in seen.body["messages"]] == ["user"]
    assert len(outcome.chunks) == 2
    assert outcome.ttft >= 0.05


async def test_the_request_has_the_requested_fields():
    options = {"extra": {"top_k": 3}, "api_key": "secret"}
    _, seen, _ = await _ask(Script(), **options)
    assert seen.path == "/v1/completions"
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.body["prompt"] == [5, 6, 7, 8]
    assert (seen.body["model"], seen.body["max_tokens"], seen.body["top_k"]) == ("stub", 6, 3)
    assert seen.body["stream"] and seen.body["ignore_eos"]
    assert seen.body["stream_options"]["include_usage"]


@pytest.mark.parametrize(
    "script, kind, detail",
    [
        (Script(status=429), "status 429", "status 429 it is"),
        (Script(status=500), "status 500", "status 500 it is"),
        (Script(cut=True), "cut off", "the connection ended"),
        (Script(error="no pages"), "error event", "no pages"),
        (Script(chunks=()), "no tokens", "without a token"),
    ],
)
async def test_a_failure_is_an_outcome_with_its_kind(script, kind, detail):
    outcome, _, _ = await _ask(script)
    assert outcome.error == kind
    assert detail in outcome.detail


async def test_a_response_that_takes_too_long_is_a_timeout():
    """On a busy machine, even before the server has received the request."""
    slow = Script(first_s=60.0)
    async with stub_openai(lambda _: slow) as stub, _client(stub.url, timeout_s=0.05) as client:
        outcome = await client.ask(JOB, time.perf_counter(), 0.0)
    assert outcome.error == "timeout"


async def test_connections_are_kept_and_replaced_after_a_failure():
    async def ask(client):
        return (await client.ask(JOB, time.perf_counter(), 0.0)).error

    answers = [
        (Script(), ""),
        (Script(status=429), "status 429"),
        (Script(cut=True), "cut off"),
        (Script(closes=True), ""),
        (Script(), ""),
        (Script(), ""),
    ]
    async with stub_openai(lambda n: answers[n][0]) as stub, _client(stub.url) as client:
        assert [await ask(client) for _ in answers] == [error for _, error in answers]
        assert stub.connections == 3


async def test_a_lost_server_is_an_outcome():
    async with stub_openai(lambda _: Script()) as stub, _client(stub.url) as client:
        gone = OpenAiClient("http://127.0.0.1:1", send="ids", timeout_s=60.0)
        outcome = await gone.ask(JOB, time.perf_counter(), 0.0)
        assert outcome.error == "connect"
        with pytest.raises(UnusableRun, match="Connection refused"):
            await gone.choose_model()
        await gone.close()
        with pytest.raises(UnusableRun, match=r"no model 'other'.*stub"):
            await client.choose_model("other")


@pytest.mark.parametrize(
    "url, base",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1", "http://host"),
        ("https://host/openai/v1/", "https://host/openai"),
        ("http://[::1]:9/", "http://[::1]:9"),
    ],
)
def test_urls_may_have_every_usual_form(url, base):
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:x", ""])
def test_an_invalid_url_is_rejected(url):
    with pytest.raises(InvalidInput):
        base_url(url)
