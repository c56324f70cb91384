"""Two routers of the same nodes, one of which is killed."""

import asyncio
import os
import signal
from collections.abc import Callable

import grpc.aio
import pytest

from protos.router_pb2 import GenerateRequest, TokenIds
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling
from tests.integration.oracle import Oracle
from tests.support.cluster import RPC_S, Cluster, slowed

# In one process: tests/api/test_idempotency.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 300  # with what a step takes here, all are far from their ends after the first ones
STEP_S = 0.01
KEY = (("idempotency-key", "6e0c8a4e-4b0f-4d7e-9f43-0f4f7d2f6c11"),)
SAMPLED = GenerateRequest(
    token_ids=TokenIds(ids=range(5, 45)),
    sampling=Sampling(temperature=2.0, max_tokens=NUM_TOKENS, ignore_eos=True),
)


async def test_only_clients_of_a_killed_router_notice_and_another_has_their_answers(
    make: Callable[..., Cluster], known: Oracle
):
    """Send requests without a seed: it is derived from the idempotency key and the request."""
    prompts = [[1 + (number * 7 + place * place) % 240 for place in range(40)] for number in (0, 1)]
    async with make(environment=slowed(STEP_S)) as cluster:
        begun = asyncio.Semaphore(0)

        async def answer(prompt: list[int]) -> tuple[int, ...]:
            tokens: list[int] = []
            async for piece in cluster.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True):
                if not tokens:
                    begun.release()
                tokens += piece.token_ids
            return tuple(tokens)

        async def ask(router: str, tokens: list[int]) -> None:
            async with grpc.aio.insecure_channel(router) as channel:
                pieces = RouterStub(channel).Generate(SAMPLED, timeout=RPC_S, metadata=KEY)
                async for piece in pieces:
                    tokens += piece.token_ids

        async with cluster.second_router() as (doomed, program):
            answers = [asyncio.create_task(answer(prompt)) for prompt in prompts]
            for _ in answers:
                await begun.acquire()
            had: list[int] = []
            asking = asyncio.create_task(ask(doomed, had))

            async def under_way() -> bool:
                return len(had) >= 20  # which no other seed draws

            await cluster.wait_until(under_way, "the other router's client has some tokens")
            os.killpg(program.pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await asking
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
        whole: list[int] = []
        await ask(cluster.address, whole)
        assert len(whole) == NUM_TOKENS and whole[: len(had)] == had
        for prompt, tokens in zip(prompts, await asyncio.gather(*answers), strict=True):
            assert tokens == known.tokens(prompt, NUM_TOKENS)
        (log,) = [log for name, log in cluster.logs.items() if name == "router"]
        assert "node lost" not in log.read_text()
