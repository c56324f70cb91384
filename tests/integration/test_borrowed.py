"""A model that transformers' class computes, through real processes: greedy tokens of a prefill and
a decode node are those of transformers."""

import asyncio
import random

import pytest

from tests.support.checkpoints import greedy_tokens, reference_model
from tests.support.cluster import Cluster
from tests.support.tiny_models import VOCABULARY_SIZE, make_tiny

# In one process: tests/pair/test_borrowed.py.
pytestmark = [pytest.mark.asyncio, pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 16


@pytest.mark.parametrize(
    "kind, path, nodes",
    [
        ("deepseek_v3", "nixl", 1),
        ("deepseek_v3", "nixl", 2),
        ("gpt_oss", "tcp", 2),
    ],
)
async def test_prefill_and_decode_nodes_give_what_transformers_gives(tmp_path, kind, path, nodes):
    directory = make_tiny(tmp_path / "model", kind)
    source = random.Random(kind)
    prompts = [source.choices(range(2, VOCABULARY_SIZE - 64), k=n) for n in (1, 16, 40, 150)]
    expected = greedy_tokens(reference_model(directory), prompts, NUM_TOKENS)
    async with Cluster(
        directory,
        tmp_path,
        path=path,
        num_prefill=nodes,
        num_decode=nodes,
        node_flags=["--engine.scheduler.chunked-prefill-tokens=64", "--model-backend=transformers"],
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
