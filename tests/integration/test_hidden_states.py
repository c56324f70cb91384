"""Hidden states of a whole system: real processes, NIXL and gRPC. Those of transformers."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import reference_model
from tests.support.cluster import Cluster, held, slowed

ENABLED = "--engine.hidden-states.enabled"
NUM_TOKENS = 200  # far from the end when the node is killed
PROMPT = [n % 251 for n in range(60)]


class Collected:
    """The answer to a request for hidden states, as it arrives."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.states = array("f")

    async def collect(self, cluster: Cluster, max_tokens: int) -> None:
        stream = cluster.stream(PROMPT, hidden_states=True, max_tokens=max_tokens, ignore_eos=True)
        async for response in stream:
            self.token_ids += response.token_ids
            self.states.frombytes(response.prompt_hidden_states)
            self.states.frombytes(response.hidden_states)

    def check(self, model: Path) -> None:
        tokens: Sequence[int] = [*PROMPT, *self.token_ids]
        with torch.inference_mode():
            hidden: Any = reference_model(model).model(torch.tensor([tokens])).last_hidden_state
        told = torch.tensor(self.states).view(-1, hidden.shape[-1])
        assert told.shape[0] == len(tokens) - 1
        assert torch.allclose(told, hidden[0, :-1].float(), atol=1e-3)


async def test_prompts_and_tokens_have_the_states_of_transformers(
    make: Callable[..., Cluster], model: Path
):
    async with make(node_flags=[ENABLED]) as cluster:
        for _ in range(2):  # the second time the prompt is cached
            answer = Collected()
            await answer.collect(cluster, 12)
            assert len(answer.token_ids) == 12
            answer.check(model)


@pytest.mark.long
async def test_each_state_is_sent_once_although_the_decode_node_is_killed(
    make: Callable[..., Cluster], model: Path
):
    async with make(num_decode=2, node_flags=[ENABLED], environment=slowed(0.02)) as cluster:
        answer = Collected()
        answering = asyncio.create_task(answer.collect(cluster, NUM_TOKENS))

        async def has_begun() -> bool:
            return len(answer.token_ids) > 5

        await cluster.wait_until(has_begun, "the answer has begun")
        busy = [bool(held(await node.describe())) for node in cluster.decode]
        await cluster.kill(cluster.decode[busy.index(True)])
        await answering
        assert len(answer.token_ids) == NUM_TOKENS
        answer.check(model)
