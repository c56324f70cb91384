"""Several nodes: the choice of a node, and the view for operators."""

import hashlib

import pytest
from grpc import StatusCode

from protos.router_pb2 import GetClusterRequest
from router.cluster import decode_client
from tests.api.rig import collect, eventually, fails, failure, pair_for, router_for, usable
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode, links_to


async def test_requests_alternate_over_nodes_and_have_rotated_prefill_nodes(model):
    async with StubNode() as p0, StubNode() as p1:
        prefill = [p0.address, p1.address]
        nodes = [StubDecodeNode(paired=prefill, serves_alone=False) for _ in range(2)]
        async with nodes[0] as d0, nodes[1] as d1:
            decode = [d0.address, d1.address]
            async with router_for(model, decode=decode, prefill=prefill, policy="round_robin") as (
                client,
                router,
            ):
                usable = router.cluster.usable
                await eventually(lambda: [len(each.prefill) for each in usable()] == [2, 2])
                calls = [client.generate("x") for _ in range(8)]
                firsts = []
                for node in nodes:
                    for _ in range(4):
                        submit = await node.submitted()
                        firsts.append((node.address, submit.prefill_addresses[0]))
                        assert sorted(submit.prefill_addresses) == sorted(prefill)
                        node.finish(submit.number)
                assert len(set(firsts)) == 4
                for call in calls:
                    await collect(call)


async def test_a_router_is_not_ready_until_a_decode_node_has_a_prefill_node(model):
    async with StubNode() as prefill, StubDecodeNode(serves_alone=False) as decode:
        async with router_for(model, decode=[decode.address], prefill=[prefill.address]) as (
            client,
            _,
        ):
            await client.wait_until_serving(False)
            await eventually(lambda: decode.num_described)
            await fails(client.generate("x"), StatusCode.UNAVAILABLE)
            decode.change_status(links=links_to([prefill.address]))
            await client.wait_until_serving()
            decode.change_status(links=[])
            await client.wait_until_serving(False)


async def test_a_node_that_prefills_itself_is_used_only_if_no_decode_node_has_a_prefill_node(model):
    async with (
        StubNode() as prefill,
        StubDecodeNode(serves_alone=False) as d0,
        StubDecodeNode(serves_alone=False) as d1,
    ):
        d0.status.falls_back = True
        decode = [d0.address, d1.address]
        async with router_for(model, decode=decode, prefill=[prefill.address]) as (client, router):
            await client.wait_until_serving()
            call = client.generate("x")
            alone = await d0.complete([20])
            assert list(alone.prefill_addresses) == []
            await collect(call)
            d1.change_status(links=links_to([prefill.address]))
            await eventually(lambda: usable(router) == [d1.address])
            d1.change_status(links=[])
            await eventually(lambda: usable(router) == [d0.address])


async def test_a_restarted_decode_node_is_used_again_at_once(model, monkeypatch):
    """Without a call of `found`, the stream would wait for its backoff."""
    monkeypatch.setattr(decode_client, "_MIN_BACKOFF_S", 3600.0)
    monkeypatch.setattr(decode_client, "_MAX_BACKOFF_S", 3600.0)
    async with StubDecodeNode() as first:
        port = int(first.address.rpartition(":")[2])
        async with router_for(model, decode=[first.address]) as (client, _):
            await client.wait_until_serving()
            await first.die()
            await client.wait_until_serving(False)
            async with StubDecodeNode(port=port) as second:
                await client.wait_until_serving()
                call = client.generate("x")
                await second.complete([20])
                await collect(call)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_with_another_tokenizer_gets_no_requests(model, role):
    right = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    hashes = {"prefill": right, "decode": right, role: "0" * 64}
    async with StubNode(tokenizer_hash=hashes["prefill"]) as prefill:
        addresses = [prefill.address]
        node = StubDecodeNode(paired=addresses, serves_alone=False, tokenizer_hash=hashes["decode"])
        async with node, router_for(model, decode=[node.address], prefill=addresses) as (client, _):
            answer = await client.stub.GetCluster(GetClusterRequest())
            states = {each.role: each.state for each in answer.nodes}
            assert states == {"prefill": "ready", "decode": "ready", role: "unhealthy"}
            await eventually(lambda: node.streams and node.num_described > 1)
            assert (await failure(client.generate("x"))).code() is StatusCode.UNAVAILABLE


async def test_operators_get_the_description_of_every_node(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        absent = "127.0.0.1:1"
        async with router_for(
            model, decode=[decode.address], prefill=[prefill.address, absent]
        ) as (client, _):
            await client.wait_until_serving()
            nodes = (await client.stub.GetCluster(GetClusterRequest())).nodes
            assert [(node.role, node.address, node.state) for node in nodes] == [
                ("prefill", prefill.address, "ready"),
                ("prefill", absent, "unreachable"),
                ("decode", decode.address, "ready"),
            ]
            assert nodes[0].instance_id == prefill.description.instance_id
            assert dict(nodes[2].pages) == {"free": 7, "cache": 1}
            assert (list(nodes[2].pids), nodes[2].links[0].path) == ([11, 12], "tcp")
            assert [rank.pid for rank in nodes[2].ranks] == [12, 13]


async def test_a_node_that_does_not_answer_delays_operators_by_at_most_two_seconds(model):
    async with pair_for(model) as pair:
        pair.prefill.answering.clear()
        request = GetClusterRequest()
        nodes = (await pair.client.stub.GetCluster(request, timeout=60)).nodes
        assert [node.state for node in nodes] == ["unreachable", "ready"]
        pair.prefill.answering.set()
