"""Decode nodes that are drained under their requests: these go on elsewhere, nobody can tell."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cluster import Cluster, slowed

# Long: that nothing is computed again asks for a machine on which a move comes to something in two
# seconds. That answers are right when nodes drain under them, test_membership.py shows everywhere.
pytestmark = pytest.mark.long

# Answers under which nodes are restarted are far from their ends when the last restart begins.
LONG_ANSWER = {"max_tokens": 600, "ignore_eos": True}
STEP_S = 0.01
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
}


def _jobs(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, and how they are asked: greedily, and sampled with penalties."""
    source = random.Random(count)
    prompts = [[source.randrange(256) for _ in range(60)] for _ in range(count)]
    ways: list[dict[str, Any]] = [{}, {**SAMPLED, "seed": 11}]
    return [(prompt, {**ways[n % 2], **LONG_ANSWER}) for n, prompt in enumerate(prompts)]


async def test_a_decode_node_is_drained_and_its_requests_go_on_at_another(
    make: Callable[..., Cluster],
):
    how: dict[str, Any] = {"router_flags": ("--policy=round_robin",)}
    async with make(num_decode=2, environment=slowed(STEP_S), **how) as cluster:
        await cluster.until_all_have_had_requests()
        jobs = _jobs(4)
        undisturbed = await asyncio.gather(*(cluster.generate(p, **how) for p, how in jobs))
        begun = [0] * len(jobs)

        async def answer(index: int) -> list[int]:
            prompt, how = jobs[index]
            tokens: list[int] = []
            async for response in cluster.stream(prompt, **how):
                tokens += response.token_ids
                begun[index] = len(tokens)
            return tokens

        answers = [asyncio.create_task(answer(n)) for n in range(len(jobs))]

        async def all_begun() -> bool:
            return min(begun) > 5

        await cluster.wait_until(all_begun, "all answers have begun")
        before = [(await node.describe()).counters["prompt_tokens"] for node in cluster.decode]
        await cluster.drain(cluster.decode[0])
        for expected, tokens in zip(undisturbed, await asyncio.gather(*answers), strict=True):
            assert tuple(tokens) == expected.token_ids
        left = await cluster.decode[1].describe()
        assert left.counters["moves/here"] == 2
        assert left.counters["prompt_tokens"] == before[1], "something was computed again"
        assert await cluster.metric("baton_requests_replayed_total") == 0
