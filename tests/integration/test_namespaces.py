"""Through real processes: equal salts share KV, different ones never do, on either node."""

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protos.router_pb2 import FlushCacheRequest
from tests.support.cluster import RIGS, Answer, Cluster, Node
from tests.support.http_client import post
from tests.support.noise_model import write

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_PROMPT = 160  # ten pages
SALTS = ("one", "other", None)
SOURCES = ("local_cache", "producer_cache", "computed")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RIGS)
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    model = tmp_path_factory.mktemp("namespaces") / "model"
    write(model)
    async with Cluster(model, tmp_path_factory.mktemp("logs"), rig=request.param) as cluster:
        yield cluster


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    source = random.Random(request.node.name)
    return [source.randrange(3, 256) for _ in range(NUM_PROMPT)]


async def asked(cluster: Cluster, prompt: list[int], salt: str | None) -> Answer:
    """Once it is in the caches."""
    answer = await cluster.generate(prompt, cache_salt=salt, max_tokens=4)
    await cluster.until_nothing_is_held()
    return answer


async def sources(cluster: Cluster, prompt: list[int], salt: str | None) -> tuple[int, ...]:
    """Return the numbers of prompt tokens from the decode node's cache, from the prefill node's
    cache beyond that, and from a forward."""
    names = [f"handoff_tokens/{source}" for source in SOURCES]
    (node,) = cluster.decode
    before = (await node.describe()).counters
    await asked(cluster, prompt, salt)
    after = (await node.describe()).counters
    return tuple(after[name] - before[name] for name in names)


async def flush(*nodes: Node) -> None:
    for node in nodes:
        await node.stub.FlushCache(FlushCacheRequest(), timeout=60)


async def test_equal_salts_share_what_is_cached_and_others_do_not(
    cluster: Cluster, prompt: list[int]
) -> None:
    first = [await asked(cluster, prompt, salt) for salt in SALTS]
    again = [await asked(cluster, prompt, salt) for salt in reversed(SALTS)]
    assert [answer.usage.cached_tokens for answer in first] == [0, 0, 0]
    assert all(answer.usage.cached_tokens >= NUM_PROMPT - 16 for answer in again)
    assert len({answer.token_ids for answer in (*first, *again)}) == 1
    assert (await asked(cluster, prompt, "a third")).usage.cached_tokens == 0


async def test_so_it_is_in_the_cache_of_either_node_alone(
    cluster: Cluster, prompt: list[int]
) -> None:
    await asked(cluster, prompt, "one")
    await flush(*cluster.prefill)
    assert await sources(cluster, prompt, "other") == (0, 0, NUM_PROMPT)
    assert await sources(cluster, prompt, "one") == (NUM_PROMPT, 0, 0)
    await flush(*cluster.decode)
    assert await sources(cluster, prompt, "a third") == (0, 0, NUM_PROMPT)
    assert await sources(cluster, prompt, "other") == (0, NUM_PROMPT - 16, 16)


async def test_over_http_a_salt_is_the_same_as_over_grpc(
    cluster: Cluster, prompt: list[int]
) -> None:
    await asked(cluster, prompt, "one")

    async def cached(salt: str) -> int:
        fields = {"prompt": prompt, "max_tokens": 2, "cache_salt": salt}
        answer = await post(cluster.http_port, "/v1/completions", fields)
        tokens: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert await cached("other") == 0
    assert await cached("one") >= NUM_PROMPT - 16
