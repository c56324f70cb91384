"""Input embeddings of a whole system: real processes, NIXL and gRPC."""

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protos import router_pb2
from protos.sampling_pb2 import Sampling
from tests.integration.oracle import Oracle
from tests.support.checkpoints import reference_model
from tests.support.cluster import Cluster, held, slowed

ENABLED = "--engine.input-embeddings.enabled"
NUM_TOKENS = 200  # far from the end when the node is killed
PROMPT = [n % 251 for n in range(60)]


def embeddings(model: Path) -> router_pb2.InputEmbeddings:
    """The rows of the model's own table, after which it has the same answer as after the ids."""
    table = reference_model(model).get_input_embeddings().weight.detach()  # type: ignore[operator]
    rows = table[torch.tensor(PROMPT)].flatten().tolist()
    return router_pb2.InputEmbeddings(values=array("f", rows).tobytes(), num_tokens=len(PROMPT))


async def collect(
    cluster: Cluster, given: router_pb2.InputEmbeddings, tokens: list[int], max_tokens: int
) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = router_pb2.GenerateRequest(input_embeddings=given, sampling=sampling)
    async for response in cluster.ask(request):
        tokens += response.token_ids


async def test_the_answer_is_that_to_the_ids_of_the_same_rows(
    make: Callable[..., Cluster], model: Path, known: Oracle
):
    given = embeddings(model)
    async with make(node_flags=[ENABLED]) as cluster:
        for _ in range(2):  # the second time the prompt is cached
            tokens: list[int] = []
            await collect(cluster, given, tokens, 12)
            assert tuple(tokens) == known.tokens(PROMPT, 12)


@pytest.mark.long
async def test_the_answer_is_the_same_although_the_decode_node_is_killed(
    make: Callable[..., Cluster], model: Path, known: Oracle
):
    given = embeddings(model)
    async with make(num_decode=2, node_flags=[ENABLED], environment=slowed(0.02)) as cluster:
        tokens: list[int] = []
        answering = asyncio.create_task(collect(cluster, given, tokens, NUM_TOKENS))

        async def has_begun() -> bool:
            return len(tokens) > 5

        await cluster.wait_until(has_begun, "the answer has begun")
        busy = [bool(held(await node.describe())) for node in cluster.decode]
        await cluster.kill(cluster.decode[busy.index(True)])
        await answering
        assert tuple(tokens) == known.tokens(PROMPT, NUM_TOKENS)
