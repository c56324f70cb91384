"""Models whose layers keep a state, or latents, through real processes over either data path."""

import asyncio
import random

import pytest

from tests.support.checkpoints import greedy_tokens, make_checkpoint, reference_model
from tests.support.cluster import Cluster

# In one process: tests/pair/test_states.py.
pytestmark = [pytest.mark.asyncio, pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 16


@pytest.mark.parametrize(
    "architecture, path",
    [
        ("qwen3_next", "tcp"),
        ("qwen3_next", "nixl"),
        ("deepseek_v3", "tcp"),
        ("deepseek_v2", "nixl"),
    ],
)
async def test_a_prefill_and_a_decode_node_give_what_transformers_gives(
    tmp_path, architecture, path
):
    directory = make_checkpoint(tmp_path / "model", architecture)
    source = random.Random(architecture)
    prompts = [source.choices(range(250), k=length) for length in (1, 16, 40, 150)]
    expected = greedy_tokens(reference_model(directory), prompts, NUM_TOKENS)
    async with Cluster(
        directory, tmp_path, path=path, node_flags=["--engine.scheduler.chunked-prefill-tokens=64"]
    ) as cluster:
        for _ in range(2):  # the second time from what is cached
            answers = await asyncio.gather(
                *(
                    cluster.generate(
                        prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                    )
                    for prompt in prompts
                )
            )
            assert [list(answer.token_ids) for answer in answers] == expected
