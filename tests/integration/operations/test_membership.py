"""Nodes join and leave a cluster of real processes during streams, without an effect on clients."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.oracle import Oracle, clients
from tests.support.processes.cluster import Cluster, Node, slowed, wait_until

# In one process: test_membership.py and test_discovery.py of tests/router/cluster. Nodes that end
# under answers: tests/faults, test_rollout.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 48
NUM_CLIENTS = 4


async def test_nodes_join_by_file_and_drain_during_streams_and_every_response_is_right(
    make: Callable[..., Cluster], known: Oracle
):
    source = random.Random(5)
    prompts = [[source.randrange(256) for _ in range(source.randrange(20, 200))] for _ in range(12)]

    async def works(node: Node, more_than: int = 0) -> None:
        """Wait until the node has handled more requests."""
        await node.until(
            lambda now: now.counters["handoffs_completed"] > more_than, "it has more requests"
        )

    how: dict[str, Any] = {
        "router_flags": ("--policy=round_robin",),
        "environment": slowed(0.05),  # or requests would keep the machine from starting nodes
    }
    async with make(by_file=True, **how) as cluster:
        (old_prefill,), (old_decode,) = cluster.prefill, cluster.decode
        async with clients(cluster, known, prompts, NUM_TOKENS, NUM_CLIENTS):
            await works(old_decode)
            new_decode = await cluster.join("decode")
            await works(new_decode)
            new_prefill = await cluster.join("prefill")
            await works(new_prefill)
            # In either order: the router may learn it first from the file or from the node itself.
            cluster.leave(old_decode)
            await cluster.drain(old_decode)
            await cluster.drain(old_prefill)
            cluster.leave(old_prefill)
            done = (await new_decode.describe()).counters["handoffs_completed"]
            await works(new_decode, more_than=done + 10)

        async def only_the_new_ones_are_shown() -> bool:
            shown = {node.address for node in (await cluster.describe()).nodes}
            return shown == {new_decode.address, new_prefill.address}

        await wait_until(only_the_new_ones_are_shown, "the router forgets the old nodes")
        assert (
            await cluster.metric("baton_requests_replayed_total") <= NUM_CLIENTS
        )  # refused while draining
        assert await cluster.metric("baton_requests_quarantined_total") == 0
