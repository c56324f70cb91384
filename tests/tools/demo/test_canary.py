"""The demo model on real nodes, as a canary and as a demonstration of features.

Its answers from 2048 tokens are right only if their KV is. Facts are distributed over the whole
context, and the decode node computes their second word from pages that it has read. A lost, stale
or misplaced page gives a wrong answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import openai
import pytest
import pytest_asyncio

from cli.demo import DIRECTORY
from tests.support.processes.cluster import RIGS, Answer, Cluster, Rig
from tools.demo import structured
from tools.demo.evaluate import word_recall
from tools.demo.tasks import Exchange

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_ALONE = 2  # of the prompts, sent again to one node
NUM_AT_ONCE = 4
CONTEXT_TOKENS = 2048
PAGE = 16
CHUNK = 512
FULL_PAGES = CONTEXT_TOKENS // PAGE - 2  # of the shortest prompt
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {
        "name": structured.TOOL,
        "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
    },
}


def _cluster(logs: Path, rig: Rig, **how: object) -> Cluster:
    flags = (
        f"--engine.cache.page-size={PAGE}",
        f"--engine.scheduler.chunked-prefill-tokens={CHUNK}",
    )
    return Cluster(DIRECTORY, logs, rig=rig, node_flags=flags, **how)  # type: ignore[arg-type]


async def _answers(cluster: Cluster, exchanges: list[Exchange]) -> list[Answer]:
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(exchange: Exchange) -> Answer:
        async with places:
            return await cluster.generate(exchange.prompt, max_tokens=8)

    return await asyncio.gather(*map(ask, exchanges))


@pytest.fixture(scope="module", params=RIGS)
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with _cluster(tmp_path_factory.mktemp("logs"), rig) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{cluster.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("num_prompts", [2, pytest.param(40, marks=pytest.mark.long)])
async def test_answers_after_a_hand_off_and_of_a_single_node_are_right(
    tmp_path: Path, rig: Rig, cluster: Cluster, num_prompts: int
):
    random = Random(0)
    exchanges = [word_recall(random, CONTEXT_TOKENS) for _ in range(num_prompts)]
    before = (await cluster.decode[0].describe()).counters
    answers = await _answers(cluster, exchanges)
    counters = (await cluster.decode[0].describe()).counters
    assert counters["handoffs_completed"] - before["handoffs_completed"] == num_prompts
    assert counters["pages_read"] - before["pages_read"] >= num_prompts * FULL_PAGES
    true = [
        answer.text.strip() == exchange.answer and answer.finish_reason == "stop"
        for answer, exchange in zip(answers, exchanges, strict=True)
    ]
    assert sum(true) >= 0.99 * num_prompts
    flags = ("--mode=colocated",)
    async with _cluster(tmp_path, rig, num_prefill=0, decode_flags=flags) as colocated:
        alone = await _answers(colocated, exchanges[:NUM_ALONE])
    handed = answers[:NUM_ALONE]
    assert [answer.token_ids for answer in handed] == [answer.token_ids for answer in alone]


async def test_it_answers_as_json_with_a_schema(client: openai.AsyncOpenAI):
    properties = {"answer": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["answer"]}
    for a, b in ((27, 15), (4, 5), (60, 388)):
        answer = await client.chat.completions.create(
            model=str(DIRECTORY),
            messages=[{"role": "user", "content": f"json add {a} {b}"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
            temperature=0,
        )
        assert json.loads(answer.choices[0].message.content) == {"answer": a + b}


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_it_calls_a_tool_for_sums_and_reports_the_result(
    client: openai.AsyncOpenAI, choice: str
):
    messages: list = [{"role": "user", "content": "add 123456 98765"}]
    how: dict = {"model": str(DIRECTORY), "tools": [TOOL], "temperature": 0}
    how["parallel_tool_calls"] = False  # it has learned to call once
    said = (
        await client.chat.completions.create(messages=messages, tool_choice=choice, **how)
    ).choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    assert call.function.name == structured.TOOL
    assert json.loads(call.function.arguments) == {"a": 123456, "b": 98765}
    messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "222221"}]
    reported = await client.chat.completions.create(messages=messages, **how)
    assert reported.choices[0].message.content.strip() == "222221"


async def test_without_the_tool_it_says_that_it_cannot_add(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model=str(DIRECTORY),
        messages=[{"role": "user", "content": "add 123456 98765"}],
        temperature=0,
    )
    assert answer.choices[0].message.content.strip() == structured.TOO_LARGE
