"""Nodes with two ranks behind a router, and what becomes of requests when a rank ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.ranks.ring import BLOCKS
from protos.router_pb2 import GetClusterResponse
from tests.integration.oracle import oracle
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import POLL_S, WAIT_S, Cluster, free_ports, held, slowed
from tests.support.scrapes import scraped, total

pytestmark = pytest.mark.slow

NUM_TOKENS = 400
FLAGS = ("--mode=colocated", "--engine.parallel.tp=2", "--engine.threads=1")


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + place * place) % 240 for place in range(40)]


async def _reported(cluster: Cluster) -> GetClusterResponse:
    """Return the cluster once all ranks have reported."""
    async with asyncio.timeout(WAIT_S):
        while True:
            described = await cluster.describe()
            if all(rank.memory_bytes for node in described.nodes for rank in node.ranks):
                return described
            await asyncio.sleep(POLL_S)


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_costs_no_answer(
    model: Path, tmp_path: Path, end: signal.Signals
) -> None:
    async with Cluster(
        model,
        tmp_path,
        num_prefill=0,
        num_decode=2,
        decode_flags=(*FLAGS, "--engine.parallel.collective-s=5"),
        patient=end is signal.SIGKILL,
        environment=slowed(0.01),  # or all answers could end before the rank does
    ) as cluster:
        for node in (await _reported(cluster)).nodes:
            assert [rank.pid for rank in node.ranks] == list(node.pids[1:])
            assert [(rank.rank, rank.device) for rank in node.ranks] == [(0, "cpu"), (1, "cpu")]
            assert all(rank.steps_behind <= BLOCKS for rank in node.ranks)
        known, begun = oracle(model), asyncio.Event()

        async def answer(number: int) -> tuple[int, ...]:
            tokens: list[int] = []
            async for response in cluster.stream(
                prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True
            ):
                tokens += response.token_ids
                begun.set()
            return tuple(tokens)

        answers = [asyncio.create_task(answer(number)) for number in range(6)]
        await begun.wait()
        busy = [node for node in cluster.decode if held(await node.describe())]
        victim = busy[0]
        _, _, follower = (await victim.describe()).pids
        os.kill(follower, end)
        for number, tokens in enumerate(await asyncio.gather(*answers)):
            assert tokens == known.tokens(prompt(number), NUM_TOKENS)
        assert await victim.child.ended() == 1
        victim.killed = True


@pytest.mark.long
async def test_experts_move_under_load_and_answers_stay_right(tmp_path: Path) -> None:
    """On both nodes of a pair, one of which computes prompts only."""
    model = make_checkpoint(tmp_path / "model", "deepseek_v3")
    ports = dict(zip(("prefill", "decode"), free_ports(2), strict=True))
    metrics = {role: (f"--metrics-port={port}",) for role, port in ports.items()}
    async with Cluster(
        model,
        tmp_path,
        node_flags=(
            *FLAGS[1:],
            "--engine.parallel.experts=ep",
            "--engine.parallel.redundant-experts=4",
            "--engine.parallel.rebalance-steps=3",
        ),
        prefill_flags=metrics["prefill"],
        decode_flags=metrics["decode"],
    ) as cluster:
        known = oracle(model)
        for batch in range(3):
            numbers = range(6 * batch, 6 * (batch + 1))
            found = await asyncio.gather(
                *(
                    cluster.generate(prompt(number), max_tokens=60, ignore_eos=True)
                    for number in numbers
                )
            )
            for number, answer in zip(numbers, found, strict=True):
                assert answer.token_ids == known.tokens(prompt(number), 60)
        for port in ports.values():

            async def moved(port: int = port) -> bool:
                return total(scraped(port), "baton_expert_moves_total") > 0

            await cluster.wait_until(moved, "experts have moved")
            assert total(scraped(port), "baton_expert_load_imbalance") >= 1
