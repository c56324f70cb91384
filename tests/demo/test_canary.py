"""The demo model as a canary: what it recalls from 2048 tokens is right only if their KV is.

The facts asked for stand all over the context, and their second word is computed by the decode
node, from pages that it has read. A page that is lost, stale or misplaced is a wrong answer.
"""

import asyncio
from pathlib import Path
from random import Random

import pytest

from cli.demo import DIRECTORY
from cli.demo.evaluate import word_recall
from cli.demo.tasks import Exchange
from tests.support.cluster import RIGS, Answer, Cluster, Rig

pytestmark = [pytest.mark.slow]

NUM_ALONE = 6  # of the prompts, asked once more of one node
NUM_AT_ONCE = 4
CONTEXT_TOKENS = 2048
PAGE = 16
CHUNK = 512
FULL_PAGES = CONTEXT_TOKENS // PAGE - 2  # of the shortest prompt


def _cluster(logs: Path, rig: Rig, **how: object) -> Cluster:
    flags = (f"--engine.cache.page-size={PAGE}", f"--engine.scheduler.chunk-tokens={CHUNK}")
    return Cluster(DIRECTORY, logs, rig=rig, node_flags=flags, **how)  # type: ignore[arg-type]


async def _answers(cluster: Cluster, exchanges: list[Exchange]) -> list[Answer]:
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(exchange: Exchange) -> Answer:
        async with places:
            return await cluster.generate(exchange.prompt, max_tokens=8)

    return await asyncio.gather(*map(ask, exchanges))


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("num_prompts", [24, pytest.param(100, marks=pytest.mark.long)])
async def test_what_is_recalled_through_the_hand_off_is_true_and_what_one_node_recalls(
    tmp_path: Path, rig: Rig, num_prompts: int
):
    random = Random(0)
    exchanges = [word_recall(random, CONTEXT_TOKENS) for _ in range(num_prompts)]
    async with _cluster(tmp_path, rig) as cluster:
        answers = await _answers(cluster, exchanges)
        counters = (await cluster.decode[0].describe()).counters
        assert counters["handoffs_held"] == num_prompts
        assert counters["pages_read"] >= num_prompts * FULL_PAGES
    true = [
        answer.text.strip() == exchange.answer and answer.finish_reason == "stop"
        for answer, exchange in zip(answers, exchanges, strict=True)
    ]
    assert sum(true) >= 0.99 * num_prompts
    flags = ("--mode=colocated",)
    async with _cluster(tmp_path, rig, num_prefill=0, decode_flags=flags) as cluster:
        alone = await _answers(cluster, exchanges[:NUM_ALONE])
    handed = answers[:NUM_ALONE]
    assert [answer.token_ids for answer in handed] == [answer.token_ids for answer in alone]
