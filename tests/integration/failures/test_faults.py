"""Failed nodes, disconnected clients and signals of terminals."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from protos.router_pb2 import ExplainResponse
from tests.integration.oracle import Oracle, random_prompts
from tests.support.network.http_client import post
from tests.support.processes.cluster import Cluster, Node, Responses, held, slowed, wait_until
from tests.support.runner.isolation import left_behind

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
MID_ANSWER = 160  # tokens: when several responses have five, all are far from their ends
_LENGTH = {"max_tokens": MID_ANSWER, "ignore_eos": True}
TURNS = ("--policy=round_robin",)


async def test_requests_of_a_killed_prefill_node_complete_unchanged(
    make: Callable[..., Cluster], known: Oracle
):
    """All requests complete. Exactly the requests that round-robin sent to the killed node are
    in flight there."""
    how: dict[str, Any] = {"router_flags": TURNS}
    async with make(num_prefill=2, **how) as cluster:
        doomed, (decode,) = cluster.prefill[0], cluster.decode
        await cluster.until_all_have_had_requests()
        cluster.freeze(doomed)
        prompts = random_prompts(*[50] * 8)
        answers = [
            asyncio.create_task(cluster.generate(p, max_tokens=NUM_TOKENS, ignore_eos=True))
            for p in prompts
        ]
        await decode.until(
            lambda now: sum(not answer.done() for answer in answers) == now.queues["transfer"],
            "the other prefill node serves the rest",
        )
        assert not (await decode.describe()).counters["handoffs_failed"]
        await cluster.kill(doomed)
        for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
            known.check(prompt, answer.token_ids, NUM_TOKENS)
        assert (await decode.describe()).counters["handoffs_failed"]


@pytest.mark.long
async def test_without_another_prefill_node_the_decode_node_prefills(
    make: Callable[..., Cluster], known: Oracle
):
    async with make() as cluster:
        (doomed,) = cluster.prefill
        cluster.freeze(doomed)
        (prompt,) = random_prompts(50)
        answer = asyncio.create_task(
            cluster.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        )

        (decode,) = cluster.decode
        await decode.until(lambda now: now.queues["transfer"] == 1, "it waits for the prefill node")
        await cluster.kill(doomed)
        known.check(prompt, (await answer).token_ids, NUM_TOKENS)
        await decode.until(lambda now: not now.links, "it has noticed the end of the dead node")
        renewed = await cluster.start_again(doomed)
        await decode.until(lambda now: now.links, "it has paired with the successor")
        (other,) = random_prompts(51)
        second = await cluster.generate(other, max_tokens=NUM_TOKENS, ignore_eos=True)
        known.check(other, second.token_ids, NUM_TOKENS)
        assert (await renewed.describe()).counters["handoffs_completed"] == 1


SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
}


async def test_requests_of_a_killed_decode_node_continue_unchanged_on_another(
    make: Callable[..., Cluster], known: Oracle
):
    """In mid-response, greedy and sampled with penalties, and before the first token."""
    how: dict[str, Any] = {"router_flags": TURNS}
    async with make(num_decode=2, environment=slowed(0.02), **how) as cluster:
        doomed, other = cluster.decode
        await cluster.until_all_have_had_requests()
        prompts = random_prompts(*[60] * 4)
        undisturbed = await asyncio.gather(
            *(cluster.generate(p, **SAMPLED, **_LENGTH) for p in prompts)
        )
        requests = [
            {"prompt": prompt, "request_id": f"answer {how} {number}", **sampling, **_LENGTH}
            for how, sampling in {"greedy": {}, "sampled": SAMPLED}.items()
            for number, prompt in enumerate(prompts)
        ]
        answers = Responses(cluster, requests)
        await answers.until_all_have(5)
        cluster.freeze(doomed)
        assert max(map(len, answers.tokens)) < MID_ANSWER
        late = [
            asyncio.create_task(cluster.generate(p, max_tokens=NUM_TOKENS, ignore_eos=True))
            for p in prompts
        ]

        await wait_until(  # half of them: so are the router's turns
            lambda: sum(task.done() for task in late) == 2,
            "the other node answers those that it got, so the rest is on the frozen one",
        )
        await cluster.kill(doomed)
        received = await answers.all()
        for prompt, tokens in zip(prompts, received, strict=False):
            known.check(prompt, tokens, MID_ANSWER)
        for reference, tokens in zip(undisturbed, received[len(prompts) :], strict=True):
            assert tokens == reference.token_ids
        for prompt, task in zip(prompts, late, strict=True):
            known.check(prompt, (await task).token_ids, NUM_TOKENS)
        assert await cluster.metric("baton_requests_replayed_total") == 6
        assert not held(await other.describe())
        explained = [await cluster.explain(request["request_id"]) for request in requests]
        assert [_replay_reported(one, doomed, other) for one in explained].count(True) == 4


@pytest.mark.long
async def test_a_response_is_unchanged_if_its_node_is_killed_with_unsent_tokens(
    make: Callable[..., Cluster], known: Oracle
):
    async with make(num_decode=2, environment=slowed(0.02), router_flags=TURNS) as cluster:
        await cluster.until_all_have_had_requests()
        doomed, _ = cluster.decode
        prompts, steps = random_prompts(*[60] * 4), (await doomed.describe()).steps
        asked = {"max_tokens": MID_ANSWER, "temperature": 0.0, "ignore_eos": True}
        answers = [
            asyncio.create_task(
                post(
                    cluster.http_port,
                    "/v1/completions",
                    {"prompt": prompt, "return_token_ids": True, **asked},
                )
            )
            for prompt in prompts
        ]

        await doomed.until(
            lambda now: now.steps >= steps + MID_ANSWER // 2, "it has tokens that it has not sent"
        )
        await cluster.kill(doomed)
        for prompt, answer in zip(prompts, answers, strict=True):
            (choice,) = (await answer).json["choices"]
            known.check(prompt, choice["token_ids"], MID_ANSWER)
        assert await cluster.metric("baton_requests_replayed_total") == 2


def _replay_reported(received: ExplainResponse, doomed: Node, other: Node) -> bool:
    """Return whether it was replayed. Check the reported reason and nodes, and the final node's
    events."""
    by_router = {e.event.what: e.event.detail for e in received.events if e.where == "router"}
    if "replayed" not in by_router:
        return False
    assert received.outcome == "length" and received.completion_tokens == MID_ANSWER
    assert doomed.address in by_router["placed"] and doomed.address in by_router["failed"]
    assert other.address in by_router["replayed"]
    assert {e.node for e in received.events if e.where == "decode"} == {other.address}
    (silent,) = [node.address for node in received.nodes if node.problem]
    assert silent == doomed.address
    return True


@pytest.mark.parametrize(
    "number",
    # each frontend logs that
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)],
)
async def test_a_signal_to_the_process_groups_ends_all_processes_with_0(
    make: Callable[..., Cluster], number: signal.Signals
):
    """Send the signal like a terminal's Ctrl-C: to frontends and engines at the same time."""
    before = left_behind()
    async with make() as cluster:
        answer = await cluster.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        await cluster.stop_with(number)
    await wait_until(lambda: left_behind() <= before, "the memory that they shared is gone")


@pytest.mark.long  # in one process: tests/node/test_pair_streams.py
async def test_incompatible_nodes_refuse_to_pair_and_continue(make: Callable[..., Cluster]):
    async with make(
        prefill_flags=("--engine.cache.page-size=32",),
        decode_flags=("--engine.cache.page-size=16",),
        paired=False,
    ) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        await wait_until(
            lambda: "page_size" in decode.child.last_lines(200),
            "the decode node names the differing field",
        )
        for node in (prefill, decode):
            description = await node.describe()
            assert description.state == "ready"
            assert len(description.links) == 0
