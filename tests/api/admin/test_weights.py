"""Weight updates by operators: on all nodes, or with a report of the weights of each node."""

import asyncio

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from protos import router_pb2
from tests.api.rig import eventually
from tests.support.processes.stub_decode_node import links_to

UPDATE, PAUSE = "/update_weights_from_disk", "/pause_generation"
TAKE = "/update_weights_from_node"


async def update(pair, **fields):
    return await pair.post(UPDATE, **{"model_path": "step-7", **fields})


async def take(pair, lender, **fields):
    """Let the other nodes fetch the weights of this one."""
    lender.weights = lender.description.weights = b"w" * 16
    return await pair.post(TAKE, node=lender.address, **fields)


def weights(pair):
    return {pair.prefill.weights, pair.decode.weights}


def paused(pair):
    return {pair.prefill.paused, pair.decode.paused}


@pytest.mark.parametrize("abort, mode", [(False, "retract"), (True, "abort")])
async def test_all_nodes_are_updated_in_a_pause_and_resume(pair, abort, mode):
    done = await update(pair, abort_all_requests=abort)
    assert (done.status, done.json["success"]) == (200, True)
    assert weights(pair) == {bytes.fromhex(done.json["weights"])}
    assert (pair.prefill.in_mode, pair.decode.in_mode, paused(pair)) == (mode, mode, {""})


async def test_an_operators_pause_continues(pair):
    await pair.post(PAUSE, mode="in_place")
    answer = await pair.client.stub.UpdateWeights(router_pb2.UpdateWeightsRequest(path="x"))
    assert weights(pair) == {answer.id} and paused(pair) == {"retract"}


async def test_if_one_node_rejects_the_weights_nothing_changes_and_no_node_is_paused(pair):
    pair.prefill.refuses_weights = "model_path: its configuration belongs to another model"
    refused = await update(pair)
    assert (refused.status, refused.error["param"]) == (400, "model_path")
    assert f"prefill node {pair.prefill.address}: " in refused.error["message"]
    pair.prefill.refuses_weights, pair.prefill.calls_weights = "", b"o" * 16
    refused = await update(pair)
    assert "nodes have read different weights" in refused.error["message"]
    assert (weights(pair), paused(pair)) == ({b""}, {""})


async def test_if_one_node_fails_to_update_all_remain_paused(pair):
    pair.decode.loses_weights = "its weights are now incomplete: cut off"
    lost = await update(pair)
    assert lost.status == 409
    assert lost.error["message"] == (
        f"decode node {pair.decode.address}: its weights are now incomplete: cut off. All nodes "
        "stay paused until this is repeated"
    )
    assert paused(pair) == {"retract"}
    with pytest.raises(AioRpcError) as caught:
        await pair.client.stub.UpdateWeights(router_pb2.UpdateWeightsRequest(path="x"))
    assert caught.value.code() is StatusCode.FAILED_PRECONDITION


async def test_nodes_resume_when_former_pairs_have_paired_again(pair):
    pair.decode.unpairs = True
    updating = asyncio.create_task(update(pair))
    await eventually(lambda: all(weights(pair)))
    asked = pair.decode.num_described
    await eventually(lambda: pair.decode.num_described > asked + 1)
    assert "" not in paused(pair)
    pair.decode.description.links.extend(links_to(["127.0.0.1:1"]))
    assert (await updating).status == 200
    assert paused(pair) == {""}


@pytest.mark.parametrize("abort, mode", [(False, "retract"), (True, "abort")])
async def test_the_other_nodes_fetch_the_weights_of_a_node_in_their_own_pause(pair, abort, mode):
    done = await take(pair, pair.prefill, abort_all_requests=abort)
    assert (done.status, done.json["weights"]) == (200, (b"w" * 16).hex())
    assert weights(pair) == {b"w" * 16} and pair.decode.lender == pair.prefill.address
    assert (pair.prefill.in_mode, pair.decode.in_mode, paused(pair)) == ("", mode, {""})


async def test_a_node_with_the_requested_weights_is_not_paused(pair):
    await take(pair, pair.decode)
    pair.prefill.description.weights = pair.prefill.weights
    pair.prefill.refuses_pauses = "not now"
    request = router_pb2.UpdateWeightsRequest(from_node=pair.decode.address)
    assert (await pair.client.stub.UpdateWeights(request)).id == b"w" * 16


async def test_a_node_that_fails_to_fetch_the_weights_remains_paused(pair):
    pair.decode.loses_weights = "10.0.0.7:1: it sends no weights"
    lost = await take(pair, pair.prefill)
    assert lost.status == 409
    assert lost.error["message"] == (
        f"decode node {pair.decode.address}: 10.0.0.7:1: it sends no weights. The nodes that "
        "should load them stay paused"
    )
    assert (pair.prefill.paused, pair.decode.paused) == ("", "retract")


async def test_an_unknown_source_of_weights_is_rejected(pair):
    unknown = await pair.post(TAKE, node="127.0.0.1:1")
    assert (unknown.status, unknown.error["param"]) == (400, "node")
    assert (weights(pair), paused(pair)) == ({b""}, {""})
    both = router_pb2.UpdateWeightsRequest(from_node="127.0.0.1:1", path="x")
    with pytest.raises(AioRpcError) as caught:
        await pair.client.stub.UpdateWeights(both)
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
