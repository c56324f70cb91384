"""Pauses and empty caches as operators ask for them: of all nodes or of none."""

import asyncio
import json

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from api.admin.engines import COMMANDS
from api.auth.api_keys import hashed, new_key
from common.config import ClientsConfig
from common.errors import NodeUnavailable
from protos import router_pb2
from protos.decode_pb2 import FINISH_REASON_STOP
from router.cluster import cluster
from router.policy import PlacementKey
from tests.api.openai.openai_rig import api_for
from tests.api.rig import collect, eventually, router_for, submitted_or_over
from tests.router.test_replay import ask, two_nodes
from tests.support.http_client import post
from tests.support.stub_decode_node import StubDecodeNode, StubNode, links_to
from tests.support.stub_pooling_node import StubPoolingNode

PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"


async def test_all_nodes_are_paused_and_continued(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        where = {"decode": [decode.address], "prefill": [prefill.address]}
        async with router_for(model, **where) as (client, router):
            await client.wait_until_serving()
            done = await post(router.http_port, PAUSE, {"mode": "retract"})
            assert (done.status, done.json) == (200, {"status": "paused", "aborted": 3})
            assert (prefill.paused, decode.paused) == ("retract", "retract")
            again = await client.stub.Pause(router_pb2.PauseRequest())
            assert (again.fresh, prefill.paused) == (False, "abort")
            done = await post(router.http_port, CONTINUE, {})
            assert (done.status, done.json) == (200, {"status": "continued"})
            assert (prefill.paused, decode.paused) == ("", "")
            assert not (await client.stub.Continue(router_pb2.ContinueRequest())).was_paused
            done = await post(router.http_port, FLUSH, {})
            assert (done.status, done.json) == (200, {"status": "flushed", "pages_freed": 4})


async def test_where_one_node_is_not_paused_none_stays_so_that_was_not(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        where = {"decode": [decode.address], "prefill": [prefill.address]}
        async with router_for(model, **where) as (client, router):
            await client.wait_until_serving()
            prefill.refuses_pauses = "it is in a step that takes longer"
            refused = await post(router.http_port, PAUSE, {})
            assert refused.status == 409
            assert refused.error["message"] == (
                f"prefill node {prefill.address}: it is in a step that takes longer"
            )
            assert decode.paused == ""
            refused = await post(router.http_port, FLUSH, {})
            assert (refused.status, refused.error["param"]) == (409, None)
            with pytest.raises(AioRpcError) as caught:
                await client.stub.Pause(router_pb2.PauseRequest(mode="in_place"))
            assert caught.value.code() is StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "path, asked, param",
    [
        (PAUSE, {"mode": "wait"}, "mode"),
        (PAUSE, {"mode": 1}, "mode"),
        (PAUSE, {"mod": "abort"}, "mod"),
        (CONTINUE, {"mode": "abort"}, "mode"),
    ],
)
async def test_what_is_no_pause_reaches_no_node(model, path, asked, param):
    async with api_for(model) as api:
        answer = await api.post(path, **asked)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert api.node.paused == ""


async def test_clients_may_not_command_engines(model, tmp_path):
    keys = tmp_path / "keys"
    new = new_key()
    keys.write_text(f"[{{name: somebody, sha256: {hashed(new)}}}]")
    async with api_for(model, clients=ClientsConfig(api_keys=keys)) as api:
        for path in COMMANDS:
            assert (await post(api.router.http_port, path, {})).status == 401
            asked = await post(api.router.http_port, path, {}, authorization=f"Bearer {new}")
            assert asked.status == 403
        assert api.node.paused == ""


async def test_nothing_need_be_said_but_by_web_pages(model):
    async with api_for(model) as api:
        port = api.router.http_port
        assert (await post(port, FLUSH, b"", content_type="")).status == 200
        assert (
            await post(port, FLUSH, b"", content_type="", origin="http://evil.example")
        ).status == 415
        answer = json.loads((await post(port, PAUSE, b"", content_type="")).body)
        assert answer["status"] == "paused"


def _usable(router):
    return [choice.address for choice in router.cluster.usable()]


async def test_nothing_is_placed_on_a_paused_decode_node_unless_all_are(model):
    async with two_nodes(model) as (client, router, d0, d1):
        d0.change_status(paused=True)
        await eventually(lambda: _usable(router) == [d1.address])
        calls = [ask(client) for _ in range(4)]
        for _ in calls:
            d1.say(ended={(await d1.submitted()).number: FINISH_REASON_STOP})
        for call in calls:
            await collect(call)
        with pytest.raises(NodeUnavailable, match="no other decode node is ready"):
            router.cluster.choose_target(PlacementKey([7]), d1.address)
        d1.change_status(paused=True)
        await eventually(lambda: _usable(router) == [d0.address, d1.address])
        await client.wait_until_serving()
        calls = [ask(client) for _ in range(2)]
        for node in (d0, d1):
            node.say(ended={(await node.submitted()).number: FINISH_REASON_STOP})
        for call in calls:
            await collect(call)
        d0.change_status(paused=False)
        await eventually(lambda: _usable(router) == [d0.address])


async def test_what_only_a_paused_node_can_take_waits_there(model):
    async with two_nodes(model) as (client, router, d0, _):
        d0.adapters = {"sql": b"s" * 16}
        d0.adapters_changed()
        d0.change_status(paused=True)
        await eventually(lambda: len(_usable(router)) == 1 and router.cluster.adapters.by_name())
        call = client.generate("x", adapter="sql")
        d0.say(ended={(await d0.submitted()).number: FINISH_REASON_STOP})
        await collect(call)


async def test_paused_prefill_nodes_are_named_where_all_are(model):
    async with StubNode() as p0, StubNode() as p1:
        prefill = [p0.address, p1.address]
        async with StubDecodeNode(paired=prefill, serves_alone=False) as decode:
            async with router_for(model, decode=[decode.address], prefill=prefill) as (_, router):

                def named():
                    return [each.address for one in router.cluster.usable() for each in one.prefill]

                await eventually(lambda: named() == prefill)
                p0.description.state = "paused"
                await eventually(lambda: named() == [p1.address])
                p1.description.state = "paused"
                await eventually(lambda: named() == prefill)


async def test_texts_are_embedded_at_nodes_that_are_not_paused(model):
    async with StubPoolingNode() as p0, StubPoolingNode() as p1:
        prefill = [p0.address, p1.address]
        async with router_for(model, decode=[], prefill=prefill) as (client, router):
            await client.wait_until_serving()
            p0.description.state = "paused"
            asked = p0.num_asked
            await eventually(lambda: p0.num_asked > asked + 1 and p1.num_described)
            for _ in range(4):
                answer = await post(router.http_port, "/v1/embeddings", {"input": "x"})
                assert answer.status == 200
            assert (len(p0.calls), len(p1.calls)) == (0, 4)


async def test_requests_wait_for_a_paused_node_whose_pairs_are_made_anew(model, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.0)
    async with StubNode() as prefill:
        async with StubDecodeNode(paired=[prefill.address], serves_alone=False) as decode:
            where = {"decode": [decode.address], "prefill": [prefill.address]}
            async with router_for(model, **where) as (client, router):
                await client.wait_until_serving()
                decode.change_status(paused=True, links=[])
                await eventually(lambda: not router.cluster.ready)
                answer = asyncio.create_task(collect(ask(client)))
                await eventually(lambda: answer.done() or router.admission.num_live)
                decode.change_status(paused=False, links=links_to([prefill.address]))
                submit = await submitted_or_over(decode, answer)
                assert submit is not None, answer.exception()
                decode.say(ended={submit.number: FINISH_REASON_STOP})
                await answer
