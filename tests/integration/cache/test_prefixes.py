"""The next turn of a conversation with real processes: the prefill node reads the prefix from
the decode node, and the response is that of a node that computes everything."""

import random
from collections.abc import Callable

from tests.integration.oracle import Oracle
from tests.support.processes.cluster import Cluster

# Reading always pays and has no time limit, because its duration on a test machine is arbitrary.
ALWAYS = ("--prefix-sharing.max-cost-ratio=1e9", "--prefix-sharing.fetch-timeout-s=300")
ENOUGH = 9  # prompts, after which a node knows the duration of a token


async def test_the_next_turn_reads_its_prefix_from_the_decode_node(
    make: Callable[..., Cluster], known: Oracle
):
    source = random.Random(5)
    async with make(node_flags=ALWAYS) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode

        async def turn(prompt: list[int]) -> list[int]:
            answer = await cluster.generate(prompt, max_tokens=40, ignore_eos=True)
            known.check(prompt, answer.token_ids, 40)
            return [*prompt, *answer.token_ids, *(source.randrange(256) for _ in range(10))]

        for _ in range(ENOUGH):
            await cluster.generate([source.randrange(256) for _ in range(5)], max_tokens=1)
        talk = await turn([source.randrange(256) for _ in range(40)])
        talk = await turn(talk)  # the prefill node pairs with the decode node for this
        await prefill.until(
            lambda now: decode.address in {link.peer for link in now.links},
            "it can read from the decode node",
        )
        before = (await prefill.describe()).counters
        await turn(talk)
        after = (await prefill.describe()).counters
        assert after["prompt_token_ways/fetched"] > before["prompt_token_ways/fetched"]
        assert (await decode.describe()).counters["prefix_loans/completed"] >= 1
