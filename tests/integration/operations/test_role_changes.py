"""Nodes that change their role under load, as real processes, without an effect on clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.oracle import Oracle
from tests.support.processes import fork_server
from tests.support.processes.cluster import Cluster, Node, slowed

# In one process: tests/node/frontend/test_role_switch.py.
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 24
STEP_S = 0.003
PROMPTS = [[(7 * client + 3 * n) % 250 + 1 for n in range(50 + client)] for client in range(4)]
ROUND_ROBIN = ("--policy=round_robin",)
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "seed": 11,
}


@asynccontextmanager
async def _load(cluster: Cluster, known: Oracle) -> AsyncIterator[list[int]]:
    """Clients that send requests continuously while inside the context, each with its own
    expected response. Yields the number of right ones. Any other response, or an error, fails
    the test."""
    expected = [known.tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    right = [0]
    over = asyncio.Event()

    async def ask(number: int) -> None:
        while not over.is_set():
            how: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
            answer = await cluster.generate(PROMPTS[number], **how)
            assert answer.token_ids == expected[number]
            right[0] += 1

    async with asyncio.TaskGroup() as clients:
        for number in range(len(PROMPTS)):
            clients.create_task(ask(number))
        try:
            yield right
        finally:
            over.set()


async def _works(cluster: Cluster, node: Node) -> None:
    """Return when hand-offs of the node's role have completed."""

    async def has() -> bool:
        return bool((await node.describe()).counters["handoffs_completed"])

    await cluster.wait_until(has, f"{node.address} has requests in its new role")


def _switch(cluster: Cluster, node: Node, role: str, secret: Path) -> tuple[int, str]:
    """Run `baton nodes set-role` and return its exit code and output."""
    command = ("cli.main", "nodes", "set-role", node.address, role)
    said = fork_server.run(
        *command, f"--router={cluster.address}", f"--secret-file={secret}", timeout_s=300
    )
    return said.returncode, said.stdout + said.stderr


async def test_nodes_take_the_other_role_under_load_and_every_response_is_right(
    make: Callable[..., Cluster], known: Oracle, tmp_path: Path
) -> None:
    async with make(num_decode=2, environment=slowed(STEP_S), router_flags=ROUND_ROBIN) as cluster:
        (prefill,), (_, decode) = cluster.prefill, cluster.decode
        assert cluster.secret_file is not None
        stranger = tmp_path / "stranger"
        stranger.write_text("x" * 40)
        async with _load(cluster, known) as right:
            for node in (prefill, decode):
                await _works(cluster, node)

            async def switch(node: Node, role: str, shown: Path) -> tuple[int, str]:
                return await asyncio.to_thread(_switch, cluster, node, role, shown)

            code, words = await switch(prefill, "decode", cluster.secret_file)
            assert code == 1 and "is the only one: no prefill node would be left" in words
            code, words = await switch(decode, "prefill", stranger)
            assert code == 1 and "UNAUTHENTICATED" in words
            before = await decode.describe()
            code, words = await switch(decode, "prefill", cluster.secret_file)
            assert code == 0 and f"{decode.address} is a prefill node after" in words, words
            await cluster.until_has_role(decode, "prefill")
            after = await decode.describe()
            assert after.role == "prefill" and after.instance_id != before.instance_id
            assert list(after.pids) == list(before.pids)  # which have the weights
            assert after.pages["free"] < sum(after.pages.values())  # and the prefixes
            await _works(cluster, decode)
            await cluster.switch(prefill, "decode")
            await _works(cluster, prefill)
            asked = right[0]

            async def responses_continue() -> bool:
                return right[0] >= asked + len(PROMPTS)

            await cluster.wait_until(responses_continue, "answers come as before")


# Long, because no token may be computed again, which requires a machine on which a migration takes
# less than two seconds. test_membership.py shows on every machine that responses are right when
# nodes drain.
@pytest.mark.parametrize("leaves_by", ["drain", "switch"])
async def test_running_requests_migrate_when_their_node_changes_its_role(
    make: Callable[..., Cluster], leaves_by: str
) -> None:
    async with make(num_decode=2, environment=slowed(0.01), router_flags=ROUND_ROBIN) as cluster:
        await cluster.until_all_have_had_requests()
        how: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
        jobs = [(p, how if n % 2 else {**how, **SAMPLED}) for n, p in enumerate(PROMPTS)]
        undisturbed = await asyncio.gather(*(cluster.generate(p, **how) for p, how in jobs))
        begun = [0] * len(jobs)

        async def answer(index: int) -> list[int]:
            prompt, how = jobs[index]
            tokens: list[int] = []
            async for response in cluster.stream(prompt, **how):
                tokens += response.token_ids
                begun[index] = len(tokens)
            return tokens

        answers = [asyncio.create_task(answer(n)) for n in range(len(jobs))]

        async def all_begun() -> bool:
            return min(begun) > 5

        await cluster.wait_until(all_begun, "all responses have begun")
        stays, goes = cluster.decode
        before = (await stays.describe()).counters["prompt_tokens"]
        await (cluster.drain(goes) if leaves_by == "drain" else cluster.switch(goes, "prefill"))
        for expected, tokens in zip(undisturbed, await asyncio.gather(*answers), strict=True):
            assert tuple(tokens) == expected.token_ids
        left = await stays.describe()
        assert left.counters["moves/here"] == 2
        assert left.counters["prompt_tokens"] == before, "something was computed again"
        assert await cluster.metric("baton_requests_replayed_total") == 0
