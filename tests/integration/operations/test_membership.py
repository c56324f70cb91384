"""Nodes join and leave a cluster of real processes during streams, without an effect on clients."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.oracle import oracle
from tests.support.models.noise_model import write
from tests.support.processes.cluster import RIGS, Cluster, Node, Rig, slowed

# In one process: test_membership.py and test_discovery.py of tests/router/cluster. Nodes that end
# under answers: tests/faults, test_rollout.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 48
NUM_CLIENTS = 4


@pytest.mark.parametrize("rig", RIGS)
async def test_nodes_join_by_file_and_drain_during_streams_and_every_response_is_right(
    rig: Rig, tmp_path: Path
):
    model = tmp_path / "model"
    write(model)
    known, source = oracle(model), random.Random(5)
    prompts = [[source.randrange(256) for _ in range(source.randrange(20, 200))] for _ in range(12)]
    answers: list[tuple[list[int], tuple[int, ...]]] = []
    over = asyncio.Event()
    turns = itertools.cycle(prompts)

    async def ask_again_and_again(cluster: Cluster) -> None:
        while not over.is_set():
            prompt = next(turns)
            answer = await cluster.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            answers.append((prompt, answer.token_ids))

    async def counts(node: Node, counter: str, more_than: int = 0) -> None:
        """Wait until the node has handled more requests."""

        async def has() -> bool:
            return (await node.describe()).counters[counter] > more_than

        await cluster.wait_until(has, f"{node.program.name} counts {counter}")

    how: dict[str, Any] = {
        "router_flags": ("--policy=round_robin",),
        "environment": slowed(0.05),  # or requests would keep the machine from starting nodes
    }
    async with Cluster(model, tmp_path, rig=rig, by_file=True, **how) as cluster:
        (old_prefill,), (old_decode,) = cluster.prefill, cluster.decode
        clients = [asyncio.create_task(ask_again_and_again(cluster)) for _ in range(NUM_CLIENTS)]
        await counts(old_decode, "handoffs_completed")

        new_decode = await cluster.join("decode")
        await counts(new_decode, "handoffs_completed")
        new_prefill = await cluster.join("prefill")
        await counts(new_prefill, "handoffs_completed")

        # In either order: the router may learn it first from the file or from the node itself.
        cluster.leave(old_decode)
        await cluster.drain(old_decode)
        await cluster.drain(old_prefill)
        cluster.leave(old_prefill)
        done = (await new_decode.describe()).counters["handoffs_completed"]
        await counts(new_decode, "handoffs_completed", more_than=done + 10)

        over.set()
        await asyncio.gather(*clients)

        async def only_the_new_ones_are_shown() -> bool:
            shown = {node.address for node in (await cluster.describe()).nodes}
            return shown == {new_decode.address, new_prefill.address}

        await cluster.wait_until(only_the_new_ones_are_shown, "the router forgets the old nodes")
        assert (
            await cluster.metric("baton_requests_replayed_total") <= NUM_CLIENTS
        )  # refused while draining
        assert await cluster.metric("baton_requests_quarantined_total") == 0
    for prompt, tokens in answers:
        known.check(prompt, tokens, NUM_TOKENS)
