"""Kills of decode nodes during responses whose two likeliest tokens differ in the last bit of
their logits. With `engine.batch_invariant`, no response changes."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hardware.devices import need_invariant_products
from tests.support.models.checkpoints import make_checkpoint
from tests.support.processes.cluster import Cluster, Responses, slowed

NUM_TOKENS = 40
TOGETHER = 4
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(7200)]
STEP_S = 0.01  # added to each step, so that nodes are killed within responses


def near_ties(directory: Path, family: str) -> Path:
    """Make a checkpoint whose tokens 2i and 2i + 1 have rows of the head that differ in the last
    bit of one number."""
    path = make_checkpoint(directory, family) / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    rows = head[0::2].clone()
    largest = rows.abs().argmax(1, keepdim=True)
    values = rows.gather(1, largest)
    nudged = torch.nextafter(values, values + values.sign())
    head[1::2] = rows.scatter(1, largest, nudged)[: len(head[1::2])]
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@asynccontextmanager
async def system(directory: Path, family: str) -> AsyncIterator[Cluster]:
    model = near_ties(directory / "model", family)
    async with Cluster(
        model,
        directory / "logs",
        num_decode=2,
        node_flags=("--engine.batch-invariant", "--engine.threads=1"),
        router_flags=("--policy=random",),
        with_secret=False,
        environment=slowed(STEP_S),
    ) as cluster:
        yield cluster


async def num_parted(cluster: Cluster, kills: int) -> int:
    """Kill decode nodes at random tokens. Return how many responses differ from those without a
    kill."""
    draw, parted, how = random.Random(kills), 0, {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    for _ in range(kills):
        prompts = [draw.choices(range(1, 250), k=draw.randrange(5, 90)) for _ in range(TOGETHER)]
        known = [(await cluster.generate(each, **how)).token_ids for each in prompts]
        running = Responses(cluster, [{"prompt": each, **how} for each in prompts])
        await running.until_one_has(draw.randrange(1, NUM_TOKENS - 5))
        killed = draw.choice(cluster.decode)
        await cluster.kill(killed)
        responses = await running.all()
        parted += sum(own != other for own, other in zip(known, responses, strict=True))
        await cluster.start_again(killed)
        await cluster.until_whole()
    return parted


@pytest.mark.long
@pytest.mark.parametrize(
    "family, kills",
    [
        ("qwen3_moe", 5),
        *(pytest.param(*case, marks=NIGHTLY) for case in (("qwen3", 100), ("deepseek_v3", 100))),
        pytest.param("qwen3_next", 5, marks=NIGHTLY),
    ],
)
async def test_kills_do_not_change_responses_with_nearly_equal_tokens(tmp_path, family, kills):
    need_invariant_products(torch.float32)
    async with system(tmp_path, family) as cluster:
        assert await num_parted(cluster, kills) == 0
        assert await cluster.metric("baton_requests_replayed_total") >= kills // 2
