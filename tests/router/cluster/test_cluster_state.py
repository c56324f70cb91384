"""Reported and missing states of nodes, and their effect on other nodes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common import rpc
from router.cluster import cluster_state
from router.cluster.cluster_state import ClusterState
from tests.api.rig import collect, eventually, router_for, usable
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode

NO_MESSAGE = b"\xff"


class Babbler(StubNode):
    """Answers every call with bytes that are no message."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.num_calls = 0

    def _add_services(self, server: grpc.aio.Server) -> None:
        async def one(request: bytes, context: Any) -> bytes:
            self.num_calls += 1
            return NO_MESSAGE

        async def many(request: object, context: Any) -> AsyncIterator[bytes]:
            self.num_calls += 1
            yield NO_MESSAGE

        node = {
            "Describe": grpc.unary_unary_rpc_method_handler(one),
            "WatchCache": grpc.unary_stream_rpc_method_handler(many),
        }
        decode_node = {"Serve": grpc.stream_stream_rpc_method_handler(many)}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("baton.v1.Node", node),
                grpc.method_handlers_generic_handler("baton.v1.DecodeNode", decode_node),
            )
        )


async def test_nodes_with_invalid_responses_get_no_requests_and_do_not_affect_others(model):
    async with Babbler("prefill") as p, Babbler("decode") as d, StubDecodeNode() as node:
        decode = [d.address, node.address]
        async with router_for(model, decode=decode, prefill=[p.address]) as (client, running):
            await client.wait_until_serving()
            await eventually(lambda: p.num_calls > 2 and d.num_calls > 2)
            assert usable(running) == [node.address]
            call = client.generate("x")
            await node.complete([20])
            assert (await collect(call))[1] == [20]


async def test_a_node_that_does_not_answer_blocks_no_requests_of_others(model, monkeypatch):
    monkeypatch.setattr(cluster_state, "_DEADLINE_S", 600.0)
    async with StubDecodeNode() as silent, StubDecodeNode() as node:
        silent.answering.clear()
        async with router_for(model, decode=[silent.address, node.address]) as (client, running):
            await client.wait_until_serving()
            assert usable(running) == [node.address]


async def test_reports_of_a_node_expire_when_it_is_lost():
    asking = ClusterState(tokenizer_hash="")
    async with StubNode() as node, rpc.make_channel(node.address) as channel:
        node.answering.clear()
        asking.join("prefill", node.address, channel)
        look = asyncio.create_task(asking.survey())
        await eventually(lambda: node.num_asked)
        asking.lost(node.address, broke=True)
        node.answering.set()
        await look
        assert not asking.fit(node.address, "prefill")
        await asking.survey()
        assert asking.fit(node.address, "prefill")


@pytest.mark.parametrize(
    "lie",
    [{"state": "excellent"}, {"model": "m" * (1 << 20)}],
    ids=["a state that there is not", "a megabyte of itself"],
)
async def test_a_node_with_an_impossible_description_gets_no_requests(lie):
    asking = ClusterState(tokenizer_hash="")
    async with StubNode() as node, rpc.make_channel(node.address) as channel:
        node.description.MergeFrom(type(node.description)(**lie))
        asking.join("prefill", node.address, channel)
        (report,) = await asking.survey()
        assert report.state in ("unhealthy", "unreachable")
        assert not asking.fit(node.address, "prefill")


@pytest.mark.parametrize(("drained", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_only_the_loss_of_a_node_that_did_not_drain_is_a_warning(drained, level, caplog):
    """Log no warning for a planned end."""
    caplog.set_level(logging.INFO, "router.cluster")
    looking = ClusterState(tokenizer_hash="")
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        looking.join("decode", "127.0.0.1:1", channel)
        if drained:
            looking.drains("127.0.0.1:1")
        await looking.survey()
    reported = [each.levelno for each in caplog.records if "does not respond" in each.getMessage()]
    assert reported == [level]
