"""The next turn of a conversation, with real programs: what the decode node has of it is read
there, and the answer is that of a node that computes everything."""

import random
from collections.abc import Callable

from tests.integration.oracle import Oracle
from tests.support.cluster import Cluster

# Reading always pays, and may take its time: what it takes on the machine of a test says nothing.
ALWAYS = ("--prefix-sharing.max-cost-ratio=1e9", "--prefix-sharing.fetch-timeout-s=300")
ENOUGH = 9  # prompts, after which a node knows what computing takes


async def test_the_next_turn_is_read_where_the_last_one_was_answered(
    make: Callable[..., Cluster], known: Oracle
):
    source = random.Random(5)
    async with make(node_flags=ALWAYS) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode

        async def paired() -> bool:
            return decode.address in {link.peer for link in (await prefill.describe()).links}

        async def turn(prompt: list[int]) -> list[int]:
            answer = await cluster.generate(prompt, max_tokens=40, ignore_eos=True)
            known.check(prompt, answer.token_ids, 40)
            return [*prompt, *answer.token_ids, *(source.randrange(256) for _ in range(10))]

        for _ in range(ENOUGH):
            await cluster.generate([source.randrange(256) for _ in range(5)], max_tokens=1)
        talk = await turn([source.randrange(256) for _ in range(40)])
        talk = await turn(talk)  # for which the prefill node pairs with the decode node
        await cluster.wait_until(paired, "the prefill node can read from the decode node")
        before = (await prefill.describe()).counters
        await turn(talk)
        after = (await prefill.describe()).counters
        assert after["prompt_token_ways/fetched"] > before["prompt_token_ways/fetched"]
        assert (await decode.describe()).counters["prefix_loans/completed"] >= 1
