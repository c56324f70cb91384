"""Placement of prompts by the cache contents that prefill nodes report."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common import rpc
from common.requests.namespace import namespace_of, page_names
from protos.decode_pb2 import FINISH_REASON_STOP as STOP
from protos.router_pb2 import GetClusterRequest, TokenIds
from router.policy import prefix_index
from router.policy.prefix_index import CacheWatch, PrefixIndex, PromptPrefixes
from tests.api.rig import collect, eventually, served
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode

SIZE = 16
PREFIX = [5, 6, 7, 8] * 8  # two pages
PAGES = page_names(PREFIX, SIZE)


@asynccontextmanager
async def watching(node: StubNode) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex()
    async with rpc.make_channel(node.address) as channel:
        watch = asyncio.create_task(CacheWatch(index).run(node.address, channel))
        await eventually(lambda: node.watchers)
        yield index
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert index.num_pages(node.address) == 0


async def test_the_index_follows_the_events_of_a_node():
    async with StubNode() as node, watching(node) as index:
        node.send_cache_events(page_size=SIZE, cleared=True, stored=PAGES[:1])
        await eventually(lambda: index.num_pages(node.address) == 1)
        node.send_cache_events(page_size=SIZE, stored=PAGES[1:])
        await eventually(lambda: index.cached_tokens(PromptPrefixes(PREFIX), node.address) == 32)
        node.send_cache_events(page_size=SIZE, removed=PAGES[1:])
        await eventually(lambda: index.cached_tokens(PromptPrefixes(PREFIX), node.address) == 16)


async def test_a_node_that_cannot_be_heard_loses_its_entries_until_it_starts_again(monkeypatch):
    monkeypatch.setattr(prefix_index, "_MIN_BACKOFF_S", 0.01)
    async with StubNode() as node, watching(node) as index:
        node.send_cache_events(page_size=SIZE, cleared=True, stored=PAGES)
        await eventually(lambda: index.num_pages(node.address) == 2)
        node.send_cache_events()
        await eventually(lambda: index.num_pages(node.address) == 0)
        await eventually(lambda: node.watchers)
        node.send_cache_events(page_size=SIZE, cleared=True, stored=PAGES[:1])
        await eventually(lambda: index.num_pages(node.address) == 1)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"page_size": SIZE, "stored": PAGES},
        {"page_size": 0, "cleared": True, "stored": PAGES},
        {"page_size": SIZE, "cleared": True, "stored": range(1 << 17)},
        {"page_size": SIZE, "cleared": True, "removed": range(1 << 17)},
    ],
    ids=["begins in the middle", "no page size", "too much comes", "too much goes"],
)
async def test_invalid_events_are_ignored(monkeypatch, nonsense):
    monkeypatch.setattr(prefix_index, "_MIN_BACKOFF_S", 0.01)
    async with StubNode() as node, watching(node) as index:
        reported = node.watchers[0]
        node.send_cache_events(**nonsense)
        await eventually(lambda: node.watchers and reported not in node.watchers)
        assert index.num_pages(node.address) == 0


@pytest.mark.parametrize("policy, listens", [("prefix_aware", True), ("least_tokens", False)])
async def test_events_are_requested_only_if_the_policy_uses_them(model, policy, listens):
    async with StubNode() as prefill:
        prefilled = {"node": StubDecodeNode(paired=[prefill.address]), "prefill": [prefill.address]}
        async with served(model, policy=policy, **prefilled) as (client, _, _):
            for _ in range(2):  # earlier calls have arrived by then
                await client.stub.GetCluster(GetClusterRequest())
            assert bool(prefill.watchers) is listens


@asynccontextmanager
async def first_of(model: Path, *nodes: StubNode) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Yield a router that receives events of all these nodes, and a call that returns the first
    node to which it sends a prompt."""
    prefill = [node.address for node in nodes]
    decode = StubDecodeNode(paired=prefill, serves_alone=False)
    async with served(model, decode, prefill=prefill) as (client, _, _):

        async def first(salt: str | None = None) -> str:
            tokens = TokenIds(ids=[*PREFIX, 9])
            call = client.generate(token_ids=tokens, cache_salt=salt)
            submit = await decode.complete([20], STOP)
            await collect(call)
            address: str = submit.prefill_addresses[0]
            return address

        await eventually(lambda: all(node.watchers for node in nodes))
        # Reported to several streams: the first responses may arrive before all of them are read.
        async with asyncio.timeout(60):
            yield first


async def test_a_prompt_goes_to_the_node_that_has_reported_its_prefix(model):
    async with StubNode() as p0, StubNode() as p1, StubNode() as p2:
        async with first_of(model, p0, p1, p2) as first:
            for holder in (p1, p2, p0):
                for node in (p0, p1, p2):
                    stored = PAGES if node is holder else []
                    node.send_cache_events(page_size=SIZE, cleared=True, stored=stored)
                while await first() != holder.address:
                    pass


async def test_a_prompt_goes_to_the_node_that_has_its_prefix_in_its_own_namespace(model):
    async with StubNode() as p0, StubNode() as p1, first_of(model, p0, p1) as first:
        mine = page_names(PREFIX, SIZE, namespace_of("mine"))
        p0.send_cache_events(page_size=SIZE, cleared=True, stored=PAGES)
        p1.send_cache_events(page_size=SIZE, cleared=True, stored=mine)
        homes = [p0.address, p1.address, p1.address]
        while [await first(salt) for salt in (None, "mine", "mine")] != homes:
            pass
