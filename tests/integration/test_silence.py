"""Engines that are stopped while their frontends live on: for long, and for a moment."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.oracle import Oracle
from tests.support.cluster import Cluster, Node, slowed

# In one process: tests/router/test_silence.py, tests/pair/test_unpaired.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]
log = logging.getLogger(__name__)

# Longer than a producer waits for a consumer's beats (5 s), shorter than a router for a node's (10
# s).
PAUSE_S = 6.5


def _prompts(count: int, length: int) -> list[list[int]]:
    source = random.Random(count)
    return [[source.randrange(256) for _ in range(length)] for _ in range(count)]


async def _serves(node: Node) -> bool:
    stub = health_pb2_grpc.HealthStub(node.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=120.0)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _all_begun(cluster: Cluster, begun: list[int]) -> None:
    async def all_have_begun() -> bool:
        return min(begun) >= 5

    await cluster.wait_until(all_have_begun, "every answer has begun")


@pytest.mark.parametrize(
    "way",
    ["the process is stopped", "a forward never ends"],
)
async def test_a_decode_node_whose_engine_is_stopped_gets_nothing_until_it_goes_on(
    make: Callable[..., Cluster], known: Oracle, way: str, tmp_path: Path
):
    """Seen failing with DecodeClient._end_if_dead doing nothing: the old ones never end. And, where
    a forward never ends, with heartbeats that do not say how late the engine is: nobody notices."""
    flags = ("--policy=round_robin",)
    stops = way == "the process is stopped"
    # Where its other threads live, heartbeats go on for so long, and say how late the engine is.
    node_flags = () if stops else ("--engine.scheduler.step-timeout-s=600",)
    num_tokens = 400  # far from its end when five are out
    async with make(
        num_decode=2,
        router_flags=flags,
        node_flags=node_flags,
        patient=False,
        environment={**slowed(0.01), "STUCK_DIRECTORY": str(tmp_path)},
    ) as cluster:
        stopped, other = cluster.decode
        await cluster.until_all_have_had_requests()
        prompts = _prompts(4, 60)
        begun = [0] * len(prompts)

        async def answer(index: int) -> tuple[int, ...]:
            tokens: list[int] = []
            how = {"max_tokens": num_tokens, "ignore_eos": True}
            async for response in cluster.stream(prompts[index], **how):
                tokens += response.token_ids
                begun[index] = len(tokens)
            return tuple(tokens)

        old = [asyncio.create_task(answer(index)) for index in range(len(prompts))]
        await _all_begun(cluster, begun)
        goes_on = cluster.freeze(stopped) if stops else cluster.stick(stopped, tmp_path)
        frozen_at = time.monotonic()
        assert max(begun) < num_tokens

        async def known_as(state: str) -> bool:
            nodes = (await cluster.describe()).nodes
            return state in [each.state for each in nodes if each.address == stopped.address]

        await cluster.wait_until(lambda: known_as("unhealthy"), "the router knows")
        log.info("unhealthy after %.1f s", time.monotonic() - frozen_at)

        async def replays() -> bool:
            return bool(await cluster.metric("baton_requests_replayed_total"))

        await cluster.wait_until(replays, "what was there is replayed")
        log.info("replayed after %.1f s", time.monotonic() - frozen_at)
        assert (await stopped.describe()).state == "unhealthy"
        assert not await _serves(stopped)
        await cluster.wait_until(lambda: _serves(other), "the other one serves")

        # What is new is not placed there: each of it has one node, and is answered.
        new = await asyncio.gather(
            *(cluster.generate(prompt[::-1], max_tokens=8, ignore_eos=True) for prompt in prompts)
        )
        for prompt, reply in zip(prompts, new, strict=True):
            assert reply.token_ids == known.tokens(prompt[::-1], 8)
        # What was there goes on at the other.
        for prompt, task in zip(prompts, old, strict=True):
            async with asyncio.timeout(120.0):
                assert await task == known.tokens(prompt, num_tokens)
        assert await cluster.metric("baton_requests_replayed_total") == 2
        assert (await stopped.describe()).state == "unhealthy"

        goes_on()
        await cluster.wait_until(lambda: known_as("ready"), "it is back")
        before = (await stopped.describe()).counters["handoffs_completed"]

        async def used() -> bool:
            for prompt in prompts[:2]:
                await cluster.generate(prompt, max_tokens=2, ignore_eos=True)
            return (await stopped.describe()).counters["handoffs_completed"] > before

        await cluster.wait_until(used, "requests go there again")
        await cluster.wait_until(lambda: _serves(stopped), "its health says so")


async def test_a_prefill_node_whose_engine_is_stopped_says_that_it_is_unhealthy(
    make: Callable[..., Cluster],
):
    async with make(patient=False) as cluster:
        (prefill,) = cluster.prefill
        cluster.freeze(prefill)

        async def serves(wanted: bool) -> bool:
            return await _serves(prefill) is wanted

        await cluster.wait_until(lambda: serves(False), "its health says so")
        assert (await prefill.describe()).state == "unhealthy"
        cluster.thaw(prefill)
        await cluster.wait_until(lambda: serves(True), "it is well again")


async def test_a_short_pause_of_a_decode_engine_sends_nothing_to_local_prefill(
    make: Callable[..., Cluster], known: Oracle
):
    """Every pair ends meanwhile, and with it every hand-off; then it pairs again.

    Seen failing with each loss dispatched at once, to the candidates that were left: 35 of the 36
    were prefilled locally."""
    num_tokens = 12
    # Of its pages a third of the requests have room: the others wait in the prealloc queue, for
    # seconds, as the prefill nodes have 90 chunks each.
    how: dict[str, Any] = {
        "patient": False,
        "node_flags": (
            "--engine.cache.num-pages=256",
            "--engine.scheduler.chunked-prefill-tokens=64",
        ),
        # However long it takes on a busy machine to go on, and to pair again.
        "router_flags": ("--suspect-after-s=600", "--dead-after-s=600"),
        "decode_flags": ("--reconnect-wait-s=120",),
        "environment": slowed(0.05),
    }
    async with make(num_prefill=2, **how) as cluster:
        (decode,) = cluster.decode
        prompts = _prompts(36, 300)
        answers = [
            asyncio.create_task(cluster.generate(p, max_tokens=num_tokens, ignore_eos=True))
            for p in prompts
        ]

        async def under_way() -> bool:
            described = await decode.describe()
            queues = described.queues
            waiting = queues["prealloc"] + queues["transfer"]
            return bool(described.counters["handoffs_completed"] and waiting >= 8)

        await cluster.wait_until(under_way, "some are answered, many are not")
        cluster.freeze(decode)
        await asyncio.sleep(PAUSE_S)  # this is what happens, not a wait for something
        cluster.thaw(decode)
        for prompt, answer in zip(prompts, answers, strict=True):
            async with asyncio.timeout(120.0):
                assert (await answer).token_ids == known.tokens(prompt, num_tokens)
        counters = (await decode.describe()).counters
        assert counters["handoffs_failed"] >= 8
        assert counters["local_prefills"] == 0
        assert await cluster.metric("baton_requests_replayed_total") == 0
