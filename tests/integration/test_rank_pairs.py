"""Hand-offs between nodes with different numbers of ranks: answers are those of one rank."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.oracle import oracle
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
ONE_THREAD = "--engine.threads=1"


def prompt(number: int, length: int) -> list[int]:
    return [1 + (number * 7 + place * place) % 240 for place in range(length)]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "path"),
    [(1, 2, "tcp"), (2, 1, "nixl"), (2, 2, "nixl"), (4, 2, "tcp")],
)
async def test_answers_are_those_of_one_rank(
    model: Path, tmp_path: Path, prefill_tp: int, decode_tp: int, path: str
) -> None:
    async with Cluster(
        model,
        tmp_path,
        path=path,
        node_flags=(ONE_THREAD, "--engine.scheduler.chunked-prefill-tokens=64"),
        prefill_flags=(f"--engine.parallel.tp={prefill_tp}",),
        decode_flags=(f"--engine.parallel.tp={decode_tp}",),
    ) as cluster:
        known = oracle(model)
        prompts = [prompt(number, length) for number, length in enumerate((5, 40, 130, 200))]
        answers = await asyncio.gather(
            *(
                cluster.generate(each, max_tokens=NUM_TOKENS, ignore_eos=True)
                for each in (*prompts, *prompts)
            )
        )
        for each, answer in zip((*prompts, *prompts), answers, strict=True):
            assert tuple(answer.token_ids) == known.tokens(each, NUM_TOKENS)
