"""Hidden states, routed experts and input embeddings of a whole system: real processes, NIXL and
gRPC. Compared with transformers, also after the kill of a decode node."""

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos import router_pb2
from protos.sampling_pb2 import Sampling
from tests.integration.oracle import oracle
from tests.pair.features.test_returned_rows import experts_of
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.processes.cluster import RIGS, Cluster, Rig, held, slowed, wait_until

NUM_TOKENS = 200  # far from the end when the node is killed
PROMPT = [n % 251 for n in range(60)]
NUM_EXPERTS = 3  # per token


class Response(ABC):
    """The response to a request, as it arrives.

    Attributes:
        name: field of the request, and of messages with rows.
        rows: rows of the prompt and of the tokens.
    """

    name: str

    def __init__(self, model: Path) -> None:
        self.model = model
        self.token_ids: list[int] = []
        self.rows = b""

    @property
    def flag(self) -> str:
        """Return the flag of nodes."""
        return f"--engine.{self.name.replace('_', '-')}.enabled"

    async def collect(self, cluster: Cluster, max_tokens: int) -> None:
        async for response in self.ask(cluster, max_tokens):
            self.token_ids += response.token_ids
            for field in (f"prompt_{self.name}", self.name):
                self.rows += getattr(response, field, b"")
        assert len(self.token_ids) == max_tokens

    def ask(self, cluster: Cluster, max_tokens: int) -> Any:
        how = {self.name: True, "max_tokens": max_tokens, "ignore_eos": True}
        return cluster.stream(PROMPT, **how)

    @abstractmethod
    def check(self) -> None:
        """Compare with transformers."""

    @property
    def tokens(self) -> Sequence[int]:
        return [*PROMPT, *self.token_ids]


class HiddenStates(Response):
    name = "hidden_states"

    def check(self) -> None:
        tokens = self.tokens
        with torch.inference_mode():
            reference: Any = reference_model(self.model).model
            hidden = reference(torch.tensor([tokens])).last_hidden_state
        found = torch.tensor(array("f", self.rows)).view(-1, hidden.shape[-1])
        assert found.shape[0] == len(tokens) - 1
        assert torch.allclose(found, hidden[0, :-1].float(), atol=1e-3)


class RoutedExperts(Response):
    name = "routed_experts"

    def check(self) -> None:
        expected = experts_of(reference_model(self.model), self.tokens, NUM_EXPERTS)
        found = np.frombuffer(self.rows, np.int16).reshape(-1, *expected.shape[1:])
        assert np.array_equal(np.sort(found, -1), expected[:-1])


class InputEmbeddings(Response):
    """The rows of the model's own table, after which the response is the same as after the ids."""

    name = "input_embeddings"

    def ask(self, cluster: Cluster, max_tokens: int) -> Any:
        reference: Any = reference_model(self.model)
        table = reference.get_input_embeddings().weight.detach()
        values = array("f", table[torch.tensor(PROMPT)].flatten().tolist()).tobytes()
        given = router_pb2.InputEmbeddings(values=values, num_tokens=len(PROMPT))
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return cluster.ask(router_pb2.GenerateRequest(input_embeddings=given, sampling=sampling))

    def check(self) -> None:
        oracle(self.model).check(PROMPT, self.token_ids, len(self.token_ids))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts") / "model"
    return make_checkpoint(directory, "qwen3_moe", num_experts_per_tok=NUM_EXPERTS)


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Rig:
    rig: Rig = request.param
    return rig


@pytest.fixture(
    params=[HiddenStates, RoutedExperts, pytest.param(InputEmbeddings, marks=pytest.mark.long)]
)
def response(request: pytest.FixtureRequest, model: Path, experts: Path) -> Callable[[], Response]:
    """Return a function that makes an empty response."""
    of: type[Response] = request.param
    return lambda: of(experts if of is RoutedExperts else model)


async def test_rows_of_prompts_and_tokens_are_those_of_transformers(
    response: Callable[[], Response], rig: Rig, tmp_path: Path
):
    flags = [response().flag]
    async with Cluster(response().model, tmp_path, rig=rig, node_flags=flags) as cluster:
        for _ in range(2):  # the second time the prompt is cached
            one = response()
            await one.collect(cluster, 12)
            one.check()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("response", [HiddenStates], indirect=True)
async def test_each_row_is_sent_once_although_the_decode_node_is_killed(
    response: Callable[[], Response], rig: Rig, tmp_path: Path
):
    one = response()
    async with Cluster(
        one.model, tmp_path, rig=rig, num_decode=2, node_flags=[one.flag], environment=slowed(0.02)
    ) as cluster:
        collecting = asyncio.create_task(one.collect(cluster, NUM_TOKENS))
        await wait_until(lambda: len(one.token_ids) > 5, "the response has begun")
        busy = [bool(held(await node.describe())) for node in cluster.decode]
        await cluster.kill(cluster.decode[busy.index(True)])
        await collecting
        one.check()


@pytest.mark.long
@pytest.mark.slow
async def test_ranks_and_groups_return_all_experts(experts: Path, tmp_path: Path):
    """Each rank has some of the experts, and so does each node of a group."""
    group = [f"--engine.parallel.dp-group={tmp_path / 'group'}", "--engine.parallel.dp=2"]
    async with Cluster(
        experts,
        tmp_path,
        num_decode=2,
        node_flags=[RoutedExperts(experts).flag],
        prefill_flags=["--engine.parallel.tp=2", "--engine.threads=1"],
        decode_flags=["--engine.threads=1"],
        flags_of={f"decode-{n}": [*group, f"--engine.parallel.dp-rank={n}"] for n in range(2)},
    ) as cluster:
        for _ in range(2):
            one = RoutedExperts(experts)
            await one.collect(cluster, 12)
            one.check()
