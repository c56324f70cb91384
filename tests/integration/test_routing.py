"""Through real processes: a prompt goes where its prefix is, and is not computed again."""

import random
from pathlib import Path

import pytest

from router.policy.prefix_index import STRIDE
from tests.support.cluster import RIGS, Cluster, Rig
from tests.support.noise_model import write

PAGE_SIZE = 16
NUM_PREFIXES = 6
PREFIX_TOKENS = 2 * STRIDE  # a router's own history bridges the time until nodes have told
NUM_PREFILL = 2


@pytest.mark.long  # with stub nodes: tests/router/test_placement.py
@pytest.mark.parametrize("rig", RIGS)
async def test_prompts_go_to_the_node_that_has_their_prefix_even_from_a_router_that_is_new(
    rig: Rig, tmp_path: Path
) -> None:
    write(tmp_path / "model")
    source = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, 256) for _ in range(count)]

    # Without a cache on the decode node, what is cached is what a prefill node had.
    flags = ("--no-engine.cache.prefix-cache",)
    async with Cluster(
        tmp_path / "model", tmp_path, rig=rig, num_prefill=NUM_PREFILL, decode_flags=flags
    ) as cluster:

        async def cached(prompt: list[int]) -> int:
            return (await cluster.generate(prompt, max_tokens=2)).usage.cached_tokens

        async def watched() -> bool:
            return cluster.last_words().count("cache subscription started") == len(cluster.nodes)

        prefixes = [tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        assert [await cached([*prefix, *tokens(5)]) for prefix in prefixes] == [0] * NUM_PREFIXES
        await cluster.until_nothing_is_held()
        # They are not all on one node.
        pages = [(await node.describe()).pages["cache"] for node in cluster.prefill]
        assert min(pages) >= PREFIX_TOKENS // PAGE_SIZE
        for prefix in reversed(prefixes):
            assert await cached([*prefix, *tokens(9)]) == PREFIX_TOKENS
        # A router that has placed nothing knows what the nodes tell it.
        await cluster.kill_router()
        await cluster.start_router_again()
        await cluster.wait_until(watched, "the router watches all caches")
        for prefix in prefixes:
            assert await cached([*prefix, *tokens(9)]) == PREFIX_TOKENS
