"""Pauses, weight updates and profiles of real processes, by the commands of operators."""

import asyncio
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.integration.oracle import Oracle, oracle, random_prompts
from tests.support.models.noise_model import write
from tests.support.processes.cluster import Cluster, slowed, wait_until

pytestmark = pytest.mark.long

NUM_TOKENS = 24
STARTED, NEXT = 7, 8  # seeds


PROMPTS = random_prompts(5, 40, 130, 300)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of one model, by seed."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (STARTED, NEXT):
        write(root / str(seed), seed=seed)
    return root


async def _baton(cluster: Cluster, command: str, *arguments: str) -> str:
    said = await cluster.baton(f"nodes {command}", *arguments)
    assert said.returncode == 0, said.stderr
    return said.stdout


async def test_responses_are_those_of_the_weights_whatever_was_cached_or_running(
    make: Callable[..., Cluster], shelf: Path, tmp_path: Path
) -> None:
    prompts, known = PROMPTS, {seed: oracle(shelf / str(seed)) for seed in (STARTED, NEXT)}
    traces = tmp_path / "traces"
    traces.mkdir()
    flags = (f"--engine.weights-dir={shelf}", f"--engine.profile-dir={traces}")
    async with make(node_flags=flags, num_prefill=2, num_decode=2) as cluster:
        baton = partial(_baton, cluster)

        async def ask(prompt: list[int], of: Oracle) -> int:
            """Send a prompt and return its number of cached tokens."""
            answer = await cluster.generate(
                prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
            of.check(prompt, answer.token_ids, NUM_TOKENS)
            return answer.usage.cached_tokens

        async def ask_all(seed: int) -> list[int]:
            return await asyncio.gather(*(ask(prompt, known[seed]) for prompt in prompts))

        await ask_all(STARTED)
        assert await baton("pause", "--mode=in_place") == "paused\n"
        states = {node.state for node in (await cluster.describe()).nodes}
        assert states == {"paused"}
        waiting = asyncio.create_task(ask_all(STARTED))
        assert await baton("pause", "--mode=retract") == "already paused\n"
        assert not waiting.done()
        assert await baton("resume") == "resumed\n"
        assert sum(await waiting) > 0
        for seed in (NEXT, STARTED):
            said = await baton("update-weights", str(seed))
            assert said.startswith("all nodes use weights ")
            names = {node.weights.hex() for node in (await cluster.describe()).nodes}
            assert f"all nodes use weights {names.pop()}\n" == said and not names
            # The longest prompt was fully cached before, and no page of it with the new weights.
            assert await ask(prompts[-1], known[seed]) == 0
            await ask_all(seed)
        profiling = asyncio.create_task(baton("profile", "--steps=3", "--seconds=1"))
        while not profiling.done():
            await ask_all(STARTED)
        written = [line.rpartition(": ")[2] for line in (await profiling).splitlines()]
        assert len(set(written)) == 4
        for path in written:
            with gzip.open(path, "rt") as file:
                assert json.load(file)["traceEvents"]


async def test_a_response_reports_the_first_token_from_new_weights(
    make: Callable[..., Cluster], shelf: Path
) -> None:
    """Its tokens before are from the old weights, and the new weights continue them."""
    prompt, before, num = PROMPTS[1], oracle(shelf / str(STARTED)), 4 * NUM_TOKENS
    flags = (f"--engine.weights-dir={shelf}",)
    async with make(node_flags=flags, environment=slowed(0.05)) as cluster:
        fingerprint = (await cluster.decode[0].describe()).fingerprint
        request = GenerateRequest(
            token_ids=TokenIds(ids=prompt),
            sampling=Sampling(max_tokens=num, temperature=0.0, ignore_eos=True),
            stream_interval=1000,  # so that a message has tokens of both
        )
        answer = cluster.ask(request)
        messages = [await anext(answer)]
        await _baton(cluster, "update-weights", str(NEXT))
        messages += [message async for message in answer]
        tokens = tuple(token for each in messages for token in each.token_ids)
        old, new = messages[-1].versions
        node = await cluster.decode[0].describe()
        assert old.system_fingerprint == f"fp_{fingerprint}"
        assert new.system_fingerprint == f"fp_{node.fingerprint}" != old.system_fingerprint
        assert new.weights == node.weights != old.weights
        assert 0 == old.first_token < new.first_token < num
        known = tokens[: new.first_token]
        before.check(prompt, known, len(known))
        after, left = oracle(shelf / str(NEXT)), num - len(known)
        after.check([*prompt, *known], tokens[len(known) :], left)


@pytest.mark.parametrize(("path", "again"), [("nixl", "prefill"), ("tcp", "decode")])
async def test_a_restarted_node_fetches_the_weights_of_the_others(
    make: Callable[..., Cluster], shelf: Path, path: str, again: str
) -> None:
    """It has none of the others' files: its own directory has other weights. The next node
    fetches them from it."""
    flags = (f"--engine.weights-dir={shelf}",)
    prompt, known = PROMPTS[-1], oracle(shelf / str(NEXT))
    async with make(node_flags=flags, num_prefill=2, num_decode=2, path=path) as cluster:
        await _baton(cluster, "update-weights", str(NEXT))
        first, lender = cluster.prefill if again == "prefill" else cluster.decode
        next_one = (cluster.decode if again == "prefill" else cluster.prefill)[0]
        had = (await lender.describe()).weights

        async def ready() -> bool:
            nodes = (await cluster.describe()).nodes
            return all(node.state == "ready" and node.weights for node in nodes)

        for behind in (first, next_one):
            await cluster.kill(behind)
            behind = await cluster.start_again(behind)
            await wait_until(ready, "it is back")
            assert (await behind.describe()).weights not in (b"", had)
            said = await _baton(cluster, "update-weights", f"--from={lender.address}")
            assert said == f"all nodes use weights {had.hex()}\n"
            nodes = (await cluster.describe()).nodes
            assert {node.weights for node in nodes} == {had}
            assert {node.state for node in nodes} == {"ready"}
            lender = behind
        for _ in range(8):
            answer = await cluster.generate(
                prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
            known.check(prompt, answer.token_ids, NUM_TOKENS)
        await cluster.until_nothing_is_held()
