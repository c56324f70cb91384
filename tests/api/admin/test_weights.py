"""Other weights as operators ask for them: on all nodes, or a clear word about who has which."""

import asyncio

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from protos import router_pb2
from tests.api.openai.openai_rig import api_for
from tests.api.rig import eventually, router_for
from tests.support.http_client import post
from tests.support.stub_decode_node import StubDecodeNode, StubNode, links_to

UPDATE, PAUSE = "/update_weights_from_disk", "/pause_generation"
TAKE = "/update_weights_from_node"


class Two:
    """A router with a node of each role."""

    def __init__(self, model):
        self.prefill = StubNode()
        self._model = model

    async def __aenter__(self):
        await self.prefill.__aenter__()
        self.decode = StubDecodeNode(paired=[self.prefill.address])
        await self.decode.__aenter__()
        where = {"decode": [self.decode.address], "prefill": [self.prefill.address]}
        self._router = router_for(self._model, **where)
        self.client, self.router = await self._router.__aenter__()
        await self.client.wait_until_serving()
        return self

    async def __aexit__(self, *error):
        await self._router.__aexit__(*error)
        await self.decode.__aexit__(*error)
        await self.prefill.__aexit__(*error)

    async def update(self, **fields):
        return await post(self.router.http_port, UPDATE, {"model_path": "step-7", **fields})

    async def take(self, lender, **fields):
        """The others take what it has."""
        lender.weights = lender.description.weights = b"w" * 16
        return await post(self.router.http_port, TAKE, {"node": lender.address, **fields})

    @property
    def weights(self):
        return {self.prefill.weights, self.decode.weights}

    @property
    def paused(self):
        return {self.prefill.paused, self.decode.paused}


@pytest.fixture
async def two(model):
    async with Two(model) as two:
        yield two


@pytest.mark.parametrize("abort, mode", [(False, "retract"), (True, "abort")])
async def test_all_nodes_change_in_a_pause_and_go_on(two, abort, mode):
    done = await two.update(abort_all_requests=abort)
    assert (done.status, done.json["success"]) == (200, True)
    assert two.weights == {bytes.fromhex(done.json["weights"])}
    assert (two.prefill.in_mode, two.decode.in_mode, two.paused) == (mode, mode, {""})


async def test_a_pause_of_an_operator_goes_on(two):
    await post(two.router.http_port, PAUSE, {"mode": "in_place"})
    answer = await two.client.stub.UpdateWeights(router_pb2.UpdateWeightsRequest(path="x"))
    assert two.weights == {answer.id} and two.paused == {"retract"}


async def test_where_one_node_refuses_them_nothing_changes_and_nobody_is_paused(two):
    two.prefill.refuses_weights = "model_path: its configuration is that of another model"
    refused = await two.update()
    assert (refused.status, refused.error["param"]) == (400, "model_path")
    assert f"prefill node {two.prefill.address}: " in refused.error["message"]
    two.prefill.refuses_weights, two.prefill.calls_weights = "", b"o" * 16
    refused = await two.update()
    assert "nodes have read different weights" in refused.error["message"]
    assert (two.weights, two.paused) == ({b""}, {""})


async def test_where_one_node_could_not_change_all_stay_paused(two):
    two.decode.loses_weights = "its weights are incomplete now: cut off"
    lost = await two.update()
    assert lost.status == 409
    assert lost.error["message"] == (
        f"decode node {two.decode.address}: its weights are incomplete now: cut off; all nodes "
        "stay paused until this is done again"
    )
    assert two.paused == {"retract"}
    with pytest.raises(AioRpcError) as caught:
        await two.client.stub.UpdateWeights(router_pb2.UpdateWeightsRequest(path="x"))
    assert caught.value.code() is StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "asked, param",
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "x" * 1025}, "model_path"),
        ({"model_path": "x", "load_format": "gguf"}, "load_format"),
        ({"model_path": "x", "flush_cache": False}, "flush_cache"),
        ({"model_path": "x", "weight_version": "7"}, "weight_version"),
    ],
)
async def test_what_could_be_no_weights_reaches_no_node(model, asked, param):
    async with api_for(model) as api:
        answer = await api.post(UPDATE, **asked)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert api.node.prepared == b""


async def test_nodes_go_on_once_those_that_were_pairs_are_again(two):
    two.decode.unpairs = True
    updating = asyncio.create_task(two.update())
    await eventually(lambda: all(two.weights))
    asked = two.decode.num_described
    await eventually(lambda: two.decode.num_described > asked + 1)
    assert "" not in two.paused
    two.decode.description.links.extend(links_to(["127.0.0.1:1"]))
    assert (await updating).status == 200
    assert two.paused == {""}


@pytest.mark.parametrize("abort, mode", [(False, "retract"), (True, "abort")])
async def test_the_others_take_what_a_node_has_in_a_pause_of_their_own(two, abort, mode):
    done = await two.take(two.prefill, abort_all_requests=abort)
    assert (done.status, done.json["weights"]) == (200, (b"w" * 16).hex())
    assert two.weights == {b"w" * 16} and two.decode.lender == two.prefill.address
    assert (two.prefill.in_mode, two.decode.in_mode, two.paused) == ("", mode, {""})


async def test_who_has_what_is_to_be_taken_is_not_paused(two):
    await two.take(two.decode)
    two.prefill.description.weights = two.prefill.weights
    two.prefill.refuses_pauses = "not now"
    request = router_pb2.UpdateWeightsRequest(from_node=two.decode.address)
    assert (await two.client.stub.UpdateWeights(request)).id == b"w" * 16


async def test_who_could_not_take_them_stays_paused(two):
    two.decode.loses_weights = "10.0.0.7:1: its weights do not come"
    lost = await two.take(two.prefill)
    assert lost.status == 409
    assert lost.error["message"] == (
        f"decode node {two.decode.address}: 10.0.0.7:1: its weights do not come; those that were "
        "to take them stay paused"
    )
    assert (two.prefill.paused, two.decode.paused) == ("", "retract")


async def test_nothing_is_taken_of_a_node_that_is_not_known(two):
    unknown = await post(two.router.http_port, TAKE, {"node": "127.0.0.1:1"})
    assert (unknown.status, unknown.error["param"]) == (400, "node")
    assert (two.weights, two.paused) == ({b""}, {""})
    both = router_pb2.UpdateWeightsRequest(from_node="127.0.0.1:1", path="x")
    with pytest.raises(AioRpcError) as caught:
        await two.client.stub.UpdateWeights(both)
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
