"""A request that crashes every engine: it ends two engines, and affects no other request."""

from pathlib import Path

import grpc
import pytest

from common.request import CRASHED_TWICE
from tests.integration.oracle import oracle
from tests.support.processes.cluster import POISONED, Cluster, Node, Responses, wait_until
from tests.support.processes.poisoned.sitecustomize import DEADLY, POISON

# In one process: tests/pair/test_engine_crashes.py, tests/router/test_engine_crashes.py.
pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 120
PROMPT = 40  # tokens


def _other_request(number: int) -> list[int]:
    return [1 + (number * 7 + place * place) % 240 for place in range(PROMPT)]


async def _dead(nodes: list[Node], count: int) -> None:
    """Wait until exactly this number of engines have ended."""

    def ended() -> bool:
        for node in nodes:
            node.killed = node.child.code is not None
        return sum(node.killed for node in nodes) >= count

    await wait_until(ended, f"{count} nodes end")
    dead = [node.child for node in nodes if node.killed]
    assert [child.code for child in dead] == [1] * count
    for child in dead:
        assert f'reason="RuntimeError: {DEADLY}"' in child.log.read_text()


@pytest.mark.parametrize(
    "role, at",
    [
        pytest.param("prefill", 0, id="where prompts are computed"),
        pytest.param("decode", PROMPT + 5, id="in the midst of an answer"),
    ],
)
async def test_a_poison_request_ends_two_engines_and_no_other_request(
    model: Path, tmp_path: Path, role: str, at: int
) -> None:
    """Requests beside it get the same responses as without it."""
    async with Cluster(
        model,
        tmp_path,
        router_flags=("--policy=round_robin",),
        environment=POISONED,
        **{f"num_{role}": 3},
    ) as cluster:
        prompts = [_other_request(number) for number in (*range(at, at + 9), *range(100, 109))]
        how = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        requests = [{"prompt": prompt, **how} for prompt in prompts]
        answers = Responses(cluster, requests[:9])
        await answers.until_all_have(1)
        late = Responses(cluster, requests[9:])
        poison = [POISON, at, *_other_request(at)[2:]]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(poison, max_tokens=NUM_TOKENS, ignore_eos=True)
        reported = (refused.value.code(), refused.value.details())
        assert reported == (grpc.StatusCode.INTERNAL, CRASHED_TWICE)
        received = [*await answers.all(), *await late.all()]
        for prompt, tokens in zip(prompts, received, strict=True):
            oracle(model).check(prompt, tokens, NUM_TOKENS)
        await _dead(cluster.prefill if role == "prefill" else cluster.decode, 2)
