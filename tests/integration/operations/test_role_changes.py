"""Nodes that change their role under load, as real processes, without an effect on clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.oracle import Oracle, clients
from tests.support.processes.cluster import Cluster, Node, Responses, slowed

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


async def _works(node: Node) -> None:
    """Return when hand-offs of the node's role have completed."""
    await node.until(lambda now: now.counters["handoffs_completed"], "it has requests in its role")


async def test_nodes_take_the_other_role_under_load_and_every_response_is_right(
    make: Callable[..., Cluster], known: Oracle, tmp_path: Path
) -> None:
    async with make(num_decode=2, environment=slowed(STEP_S), router_flags=ROUND_ROBIN) as cluster:
        (prefill,), (_, decode) = cluster.prefill, cluster.decode
        stranger = tmp_path / "stranger"
        stranger.write_text("x" * 40)
        async with clients(cluster, known, PROMPTS, NUM_TOKENS) as right:
            for node in (prefill, decode):
                await _works(node)

            async def switch(node: Node, role: str, secret: Path | None = None) -> tuple[int, str]:
                command = ("nodes set-role", node.address, role)
                said = await cluster.baton(*command, secret=secret)
                return said.returncode, said.stdout + said.stderr

            code, words = await switch(prefill, "decode")
            assert code == 1 and "is the only one: no prefill node would be left" in words
            code, words = await switch(decode, "prefill", stranger)
            assert code == 1 and "UNAUTHENTICATED" in words
            before = await decode.describe()
            code, words = await switch(decode, "prefill")
            assert code == 0 and f"{decode.address} is a prefill node after" in words, words
            await cluster.until_has_role(decode, "prefill")
            after = await decode.describe()
            assert after.role == "prefill" and after.instance_id != before.instance_id
            assert list(after.pids) == list(before.pids)  # which have the weights
            assert after.pages["free"] < sum(after.pages.values())  # and the prefixes
            await _works(decode)
            await cluster.switch(prefill, "decode")
            await _works(prefill)
            await right.until_more(len(PROMPTS))


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
        jobs = [
            {"prompt": prompt, **how, **({} if number % 2 else SAMPLED)}
            for number, prompt in enumerate(PROMPTS)
        ]
        undisturbed = await Responses(cluster, jobs).all()
        answers = Responses(cluster, jobs)
        await answers.until_all_have(6)
        stays, goes = cluster.decode
        before = (await stays.describe()).counters["prompt_tokens"]
        await (cluster.drain(goes) if leaves_by == "drain" else cluster.switch(goes, "prefill"))
        assert await answers.all() == undisturbed
        left = await stays.describe()
        assert left.counters["moves/here"] == 2
        assert left.counters["prompt_tokens"] == before, "something was computed again"
        assert await cluster.metric("baton_requests_replayed_total") == 0
