"""`engine.batch_invariant` with two ranks: responses have the same bits in any batch and chunk."""

import asyncio
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.hardware.devices import need_invariant_products
from tests.support.models.checkpoints import make_checkpoint
from tests.support.processes.cluster import Cluster
from tools.bench.bits.requests import ComparedRequest, ComparedResponse, respond

pytestmark = pytest.mark.slow
COMMON = ("--engine.batch-invariant", "--engine.parallel.tp=2", "--engine.threads=1")


async def responses(
    model: Path,
    logs: Path,
    requests: list[ComparedRequest],
    *flags: str,
    together: bool,
    num_prefill: int,
) -> list[ComparedResponse]:
    """Return the responses of a system, to requests one by one or all at once."""
    async with Cluster(
        model,
        logs,
        num_prefill=num_prefill,
        node_flags=(*COMMON, *flags),
        decode_flags=() if num_prefill else ("--mode=colocated",),
        with_secret=False,
    ) as cluster:
        if together:
            return list(await asyncio.gather(*(respond(cluster, each) for each in requests)))
        return [await respond(cluster, each) for each in requests]


@pytest.mark.parametrize(
    "family, dtype",
    [
        pytest.param("llama", "float32", marks=pytest.mark.long),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.long),
        pytest.param("qwen3_next", "bfloat16", marks=pytest.mark.long),
    ],
)
async def test_two_ranks_give_the_same_bits_in_any_batch(tmp_path, family, dtype):
    need_invariant_products(getattr(torch, dtype))
    model = make_checkpoint(tmp_path / "model", family)
    draw = Random(3)
    requests = [ComparedRequest.of(draw, [""]) for _ in range(5)]
    alone, beside = [
        await responses(
            model,
            tmp_path / name,
            requests,
            f"--dtype={dtype}",
            f"--engine.scheduler.chunked-prefill-tokens={chunk}",
            together=num_prefill > 0,
            num_prefill=num_prefill,
        )
        for name, chunk, num_prefill in (("alone", -1, 0), ("beside", 37, 1))
    ]
    assert all(each.invariant for each in beside)
    assert [own.difference(other) for own, other in zip(beside, alone, strict=True)] == [""] * 5
