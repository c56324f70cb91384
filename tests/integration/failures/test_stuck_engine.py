"""An engine that makes no progress while its frontend runs."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.oracle import Oracle, random_prompts
from tests.support.processes.cluster import Cluster, Node, Responses, slowed, wait_until

# Stopped processes: tests/faults. In one process: tests/router/cluster/test_silent_nodes.py,
# tests/node/frontend/test_frontend.py, tests/pair/test_lost_pairs.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]
log = logging.getLogger(__name__)


async def _serves(node: Node) -> bool:
    stub = health_pb2_grpc.HealthStub(node.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=120.0)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_decode_node_with_a_stuck_forward_gets_no_requests_until_it_continues(
    make: Callable[..., Cluster], known: Oracle, tmp_path: Path
):
    """Seen failing if DecodeClient._end_if_dead does nothing: the old requests never end. Also
    seen failing if heartbeats do not report the lag of the engine: nothing detects it."""
    flags = ("--policy=round_robin",)
    # Its other threads run: heartbeats continue for this time, and report the lag of the engine.
    node_flags = ("--engine.scheduler.step-timeout-s=600",)
    num_tokens = 400  # far from its end after five tokens
    async with make(
        num_decode=2,
        router_flags=flags,
        node_flags=node_flags,
        patient=False,
        environment={**slowed(0.01), "STUCK_DIRECTORY": str(tmp_path)},
    ) as cluster:
        stopped, other = cluster.decode
        await cluster.until_all_have_had_requests()
        prompts = random_prompts(*[60] * 4)
        how = {"max_tokens": num_tokens, "ignore_eos": True}
        old = Responses(cluster, [{"prompt": prompt, **how} for prompt in prompts])
        await old.until_all_have(5)
        goes_on = cluster.stick(stopped, tmp_path)
        frozen_at = time.monotonic()
        assert max(map(len, old.tokens)) < num_tokens

        async def known_as(state: str) -> bool:
            nodes = (await cluster.describe()).nodes
            return state in [each.state for each in nodes if each.address == stopped.address]

        await wait_until(lambda: known_as("unhealthy"), "the router knows")
        log.info("unhealthy after %.1f s", time.monotonic() - frozen_at)
        await wait_until(
            lambda: cluster.metric("baton_requests_replayed_total"), "what was there is replayed"
        )
        log.info("replayed after %.1f s", time.monotonic() - frozen_at)
        assert (await stopped.describe()).state == "unhealthy"
        assert not await _serves(stopped)
        await wait_until(lambda: _serves(other), "the other one serves")

        # New requests are not placed there. Each has one node, and completes.
        new = await asyncio.gather(
            *(cluster.generate(prompt[::-1], max_tokens=8, ignore_eos=True) for prompt in prompts)
        )
        for prompt, reply in zip(prompts, new, strict=True):
            known.check(prompt[::-1], reply.token_ids, 8)
        # Its requests continue on the other node.
        async with asyncio.timeout(120.0):
            for prompt, tokens in zip(prompts, await old.all(), strict=True):
                known.check(prompt, tokens, num_tokens)
        assert await cluster.metric("baton_requests_replayed_total") == 2
        assert (await stopped.describe()).state == "unhealthy"

        goes_on()
        await wait_until(lambda: known_as("ready"), "it is back")
        before = (await stopped.describe()).counters["handoffs_completed"]

        async def used() -> bool:
            for prompt in prompts[:2]:
                await cluster.generate(prompt, max_tokens=2, ignore_eos=True)
            return (await stopped.describe()).counters["handoffs_completed"] > before

        await wait_until(used, "requests go there again")
        await wait_until(lambda: _serves(stopped), "its health says so")
