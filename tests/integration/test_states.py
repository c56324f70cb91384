"""Models with states, latents or transformers' classes, through real processes over either data
path."""

import asyncio
import random
from typing import Any

import pytest

from tests.support.checkpoints import greedy_tokens, make_checkpoint, reference_model
from tests.support.cluster import Cluster
from tests.support.tiny_models import VOCABULARY_SIZE, make_tiny

# In one process: tests/pair/test_other_caches.py and tests/pair/test_borrowed.py.
pytestmark = [pytest.mark.asyncio, pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 16
CHUNKS = "--engine.scheduler.chunked-prefill-tokens=64"


async def _check(cluster: Cluster, directory: Any, vocabulary: range, seed: str) -> None:
    """Check the greedy tokens of some prompts, which are cached the second time."""
    source = random.Random(seed)
    prompts = [source.choices(vocabulary, k=length) for length in (1, 16, 40, 150)]
    expected = greedy_tokens(reference_model(directory), prompts, NUM_TOKENS)
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    for _ in range(2):
        responses = await asyncio.gather(*(cluster.generate(p, **sampling) for p in prompts))
        assert [list(each.token_ids) for each in responses] == expected


@pytest.mark.parametrize(
    "architecture, path",
    [
        ("qwen3_next", "tcp"),
        ("qwen3_next", "nixl"),
        ("deepseek_v3", "tcp"),
        ("deepseek_v2", "nixl"),
    ],
)
async def test_states_and_latents_are_handed_off(tmp_path, architecture, path):
    directory = make_checkpoint(tmp_path / "model", architecture)
    async with Cluster(directory, tmp_path, path=path, node_flags=[CHUNKS]) as cluster:
        await _check(cluster, directory, range(250), architecture)


@pytest.mark.parametrize(
    "kind, path, nodes",
    [
        ("deepseek_v3", "nixl", 1),
        ("deepseek_v3", "nixl", 2),
        ("gpt_oss", "tcp", 2),
    ],
)
async def test_kv_of_transformers_classes_is_handed_off(tmp_path, kind, path, nodes):
    directory = make_tiny(tmp_path / "model", kind)
    async with Cluster(
        directory,
        tmp_path,
        path=path,
        num_prefill=nodes,
        num_decode=nodes,
        node_flags=[CHUNKS, "--model-backend=transformers"],
    ) as cluster:
        await _check(cluster, directory, range(2, VOCABULARY_SIZE - 64), kind)
