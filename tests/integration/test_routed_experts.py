"""Routed experts of a whole system: real processes, NIXL and gRPC. Those of transformers."""

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.cluster import Cluster, held, slowed

ENABLED = "--engine.routed-experts.enabled"
NUM_TOKENS = 200  # far from the end when the node is killed
PROMPT = [n % 251 for n in range(60)]
K = 3


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts") / "model"
    return make_checkpoint(directory, "qwen3_moe", num_experts_per_tok=K)


class Collected:
    """The answer to a request for routed experts, as it arrives."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ids = array("h")

    async def collect(self, cluster: Cluster, max_tokens: int) -> None:
        stream = cluster.stream(PROMPT, routed_experts=True, max_tokens=max_tokens, ignore_eos=True)
        async for response in stream:
            self.token_ids += response.token_ids
            self.ids.frombytes(response.prompt_routed_experts)
            self.ids.frombytes(response.routed_experts)

    def check(self, model: Path) -> None:
        tokens: Sequence[int] = [*PROMPT, *self.token_ids]
        with torch.inference_mode():
            logits = reference_model(model)(
                torch.tensor([tokens]), output_router_logits=True
            ).router_logits
        expected = torch.stack([layer.topk(K, -1).indices for layer in logits], dim=1)
        found = np.array(self.ids).reshape(-1, *expected.shape[1:])
        assert np.array_equal(np.sort(found, -1), expected[:-1].sort(-1).values.numpy())


async def test_prompts_and_tokens_have_the_experts_of_transformers(experts: Path, tmp_path: Path):
    async with Cluster(experts, tmp_path, node_flags=[ENABLED]) as cluster:
        for _ in range(2):  # the second time the prompt is cached
            answer = Collected()
            await answer.collect(cluster, 12)
            assert len(answer.token_ids) == 12
            answer.check(experts)


@pytest.mark.long
@pytest.mark.slow
async def test_each_row_is_sent_once_although_the_decode_node_is_killed(
    experts: Path, tmp_path: Path
):
    async with Cluster(
        experts, tmp_path, num_decode=2, node_flags=[ENABLED], environment=slowed(0.02)
    ) as cluster:
        answer = Collected()
        answering = asyncio.create_task(answer.collect(cluster, NUM_TOKENS))

        async def has_begun() -> bool:
            return len(answer.token_ids) > 5

        await cluster.wait_until(has_begun, "the answer has begun")
        busy = [bool(held(await node.describe())) for node in cluster.decode]
        await cluster.kill(cluster.decode[busy.index(True)])
        await answering
        assert len(answer.token_ids) == NUM_TOKENS
        answer.check(experts)


@pytest.mark.long
@pytest.mark.slow
async def test_ranks_and_groups_return_all_experts(experts: Path, tmp_path: Path):
    """Each rank has some of the experts, and so has each node of a group."""
    group = [f"--engine.parallel.dp-group={tmp_path / 'group'}", "--engine.parallel.dp=2"]
    async with Cluster(
        experts,
        tmp_path,
        num_decode=2,
        node_flags=[ENABLED],
        prefill_flags=["--engine.parallel.tp=2", "--engine.threads=1"],
        decode_flags=["--engine.threads=1"],
        flags_of={f"decode-{n}": [*group, f"--engine.parallel.dp-rank={n}"] for n in range(2)},
    ) as cluster:
        for _ in range(2):
            answer = Collected()
            await answer.collect(cluster, 12)
            answer.check(experts)
