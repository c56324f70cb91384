"""A colocated node as real processes, with prompts in groups of layers beside responses."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable

import pytest

from protos.router_pb2 import GenerateResponse
from tests.integration.oracle import Oracle
from tests.support.cluster import Cluster, free_ports, slowed
from tests.support.scrapes import scraped, total

pytestmark = pytest.mark.long

STREAM_TOKENS = 200


async def test_prompts_are_computed_between_decode_steps(
    make: Callable[..., Cluster], known: Oracle
) -> None:
    source = random.Random(1)
    prompts = [[source.randrange(3, 250) for _ in range(size)] for size in (40, 200, 300)]
    (port,) = free_ports(1)
    flags = (
        "--mode=colocated",
        "--engine.scheduler.split-prefill-ms=0.01",
        f"--metrics-port={port}",
    )
    async with make(num_prefill=0, decode_flags=flags, environment=slowed(0.005)) as cluster:
        stream = cluster.stream([5], max_tokens=STREAM_TOKENS, ignore_eos=True)
        response = [token async for token in _tokens(stream, 4)]
        answers = await asyncio.gather(
            *(cluster.generate(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts)
        )
        response += [token async for token in _tokens(stream, STREAM_TOKENS)]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == known.tokens(prompt, 8)
        assert tuple(response) == known.tokens([5], STREAM_TOKENS)
        scrape = scraped(port)
        assert total(scrape, "baton_step_seconds_count", mode="split") > 0
        assert total(scrape, "baton_batch_tokens_count", mode="split") > 0
        await cluster.until_nothing_is_held()


async def _tokens(
    stream: AsyncGenerator[GenerateResponse, None], count: int
) -> AsyncGenerator[int, None]:
    """Yield the tokens of the next messages, until they are `count` or the response ends."""
    async for message in stream:
        for token in message.token_ids:
            yield token
        count -= len(message.token_ids)
        if count <= 0:
            return
