"""Nodes that share experts, behind a router: hand-offs, drains, and the end of one node of a
group."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.oracle import oracle
from tests.support.models.adapters import ALL_MODULES, make_adapter, merge
from tests.support.models.checkpoints import greedy_tokens, make_checkpoint, reference_model
from tests.support.network.scrapes import scraped, total
from tests.support.processes.cluster import (
    WAIT_S,
    Cluster,
    Responses,
    free_ports,
    held,
    slowed,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]  # in one process: test_a_group_has_the_answers

NUM_TOKENS = 300


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + place * place) % 240 for place in range(40)]


def group(directory: Path, size: int, rank: int) -> Sequence[str]:
    knob = "--engine.parallel.dp"
    return f"{knob}={size}", f"{knob}-rank={rank}", f"{knob}-group={directory}"


def ask(cluster: Cluster, count: int) -> Responses:
    how = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return Responses(cluster, [{"prompt": prompt(number), **how} for number in range(count)])


async def check(model: Path, asked: Responses) -> None:
    for number, tokens in enumerate(await asked.all()):
        oracle(model).check(prompt(number), tokens, NUM_TOKENS)


def beside_a_group(model: Path, tmp_path: Path, collective_s: float = 30) -> Cluster:
    """Return two nodes of a group, and a third one alone."""
    return Cluster(
        model,
        tmp_path,
        num_prefill=0,
        num_decode=3,
        decode_flags=(
            "--mode=colocated",
            "--engine.threads=1",
            f"--engine.parallel.collective-s={collective_s}",
        ),
        flags_of={f"decode-{n}": group(tmp_path / "group", 2, n) for n in range(2)},
        router_flags=("--policy=round_robin",),
        patient=False,
        environment=slowed(0.01),  # or all responses could end before a node does
    )


# Quick, and of a frozen node: tests/engine/loop/test_lockstep.py.
async def test_the_end_of_a_node_ends_its_group_and_costs_no_response(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    async with beside_a_group(model, tmp_path, collective_s=3) as cluster:
        await cluster.until_all_have_had_requests()
        described = (await cluster.describe()).nodes
        assert [(node.group, node.group_rank) for node in described] == [
            ("group", 0),
            ("group", 1),
            ("", 0),
        ]
        asked = ask(cluster, 9)
        await asked.until_one_has(1)
        victim, other = cluster.decode[:2]
        await victim.until(held, "it has requests")
        _, engine = (await victim.describe()).pids
        os.kill(engine, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            assert await other.child.ended() == 1
        other.killed = victim.killed = True
        await check(model, asked)
        assert await victim.child.ended() == 1


async def test_a_drain_of_one_node_drains_its_group(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    async with beside_a_group(model, tmp_path) as cluster:
        await cluster.until_all_have_had_requests()
        asked = ask(cluster, 6)
        await asked.until_one_has(1)
        cluster.decode[1].child.send(signal.SIGTERM)
        await check(model, asked)
        for node in cluster.decode[:2]:
            async with asyncio.timeout(WAIT_S):
                assert await node.child.ended() == 0
            node.killed = True


async def test_groups_of_both_roles_hand_off(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "deepseek_v3")
    of_nodes = {
        f"{role}-{n}": group(tmp_path / role, 2, n)
        for role in ("prefill", "decode")
        for n in (0, 1)
    }
    async with Cluster(
        model,
        tmp_path,
        num_prefill=2,
        num_decode=2,
        node_flags=("--engine.threads=1",),
        flags_of=of_nodes,
        router_flags=("--policy=round_robin",),
    ) as cluster:
        await cluster.until_all_have_had_requests()
        await check(model, ask(cluster, 6))


async def test_a_group_has_adapters_and_pages_in_memory_and_files(tmp_path: Path) -> None:
    """The pools are small, so that prompts of the second round come from host memory or files."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    base = reference_model(model)
    adapter = make_adapter(tmp_path / "shelf" / "a", base, modules=ALL_MODULES[:4])
    prompts = [4 * prompt(number) for number in range(6)]  # fewer than 64 tokens are not loaded
    plain = [list(oracle(model).tokens(each, 8)) for each in prompts]
    adapted = greedy_tokens(merge(base, adapter), prompts, 8)
    assert adapted != plain
    metrics = [*free_ports(2)]
    async with Cluster(
        model,
        tmp_path,
        num_prefill=0,
        num_decode=2,
        decode_flags=(
            "--mode=colocated",
            "--engine.threads=1",
            "--engine.cache.num-pages=12",
            f"--engine.lora.adapter-dir={tmp_path / 'shelf'}",
            "--engine.lora.preload=a",
            f"--engine.offload.cpu-bytes={1 << 20}",
            f"--engine.offload.disk-dir={tmp_path / 'pages'}",
            f"--engine.offload.disk-bytes={1 << 20}",
        ),
        flags_of={
            f"decode-{n}": (*group(tmp_path / "group", 2, n), f"--metrics-port={metrics[n]}")
            for n in range(2)
        },
        router_flags=("--policy=round_robin",),
    ) as cluster:
        await cluster.until_all_have_had_requests()
        for _ in range(2):
            for name, expected in (("a", adapted), ("", plain)):
                for tokens, right in zip(prompts, expected, strict=True):
                    answer = await cluster.generate(
                        tokens, adapter=name, max_tokens=8, ignore_eos=True
                    )
                    assert list(answer.token_ids) == right

        def offloaded() -> bool:
            return all(
                total(scraped(port), "baton_offload_bytes_total", copy=copy) > 0
                for port in metrics
                for copy in ("loaded", "written")
            )

        await wait_until(offloaded, "both nodes use both tiers")
        assert len([*(tmp_path / "pages").glob("*/pages")]) == 2
