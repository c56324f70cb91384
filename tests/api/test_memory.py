"""Memory that operators have all nodes give back: all of them or none."""

import pytest

from protos import router_pb2
from tests.api.openai.openai_rig import api_for
from tests.api.rig import router_for
from tests.support.http_client import post
from tests.support.stub_decode_node import StubDecodeNode, StubNode

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ALL = {"kv_cache", "weights"}


async def test_all_nodes_give_memory_back_and_take_it_again(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        where = {"decode": [decode.address], "prefill": [prefill.address]}
        async with router_for(model, **where) as (client, router):
            await client.wait_until_serving()
            done = await post(router.http_port, RELEASE, {})
            assert (done.status, done.json) == (200, {"status": "released"})
            assert prefill.away == decode.away == ALL
            done = await post(router.http_port, RESUME, {"tags": ["weights"]})
            assert (done.status, done.json) == (200, {"status": "resumed"})
            assert prefill.away == decode.away == {"kv_cache"}
            await client.stub.ResumeMemory(router_pb2.ResumeMemoryRequest())
            assert not prefill.away | decode.away
            await client.stub.ReleaseMemory(router_pb2.ReleaseMemoryRequest(tags=["weights"]))
            assert prefill.away == decode.away == {"weights"}


async def test_where_one_node_keeps_its_memory_all_do(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        where = {"decode": [decode.address], "prefill": [prefill.address]}
        async with router_for(model, **where) as (client, router):
            await client.wait_until_serving()
            prefill.refuses_pauses = "requests are here: pause the node first"
            refused = await post(router.http_port, RELEASE, {})
            assert refused.status == 409
            assert refused.error["message"] == (
                f"prefill node {prefill.address}: requests are here: pause the node first"
            )
            assert not decode.away


@pytest.mark.parametrize("path", [RELEASE, RESUME])
@pytest.mark.parametrize("tags", [["cuda_graph"], ["weights"] * 9, "weights"])
async def test_what_is_no_part_of_memory_reaches_no_node(model, path, tags):
    async with api_for(model) as api:
        answer = await api.post(path, tags=tags)
        assert (answer.status, answer.error["param"]) == (400, "tags")
        assert not api.node.away
