"""Operator commands for all engines: pauses, empty caches, sleep mode, profiles."""

import asyncio
import json
from unittest import mock

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from api.admin.engines import COMMANDS
from api.auth.api_keys import hashed, new_key
from common.config import ClientsConfig
from common.errors import NodeUnavailable
from protos import router_pb2
from router.cluster import cluster
from router.policy.load import PlacementKey
from tests.api.rig import (
    api_for,
    ask,
    collect,
    eventually,
    pair_for,
    router_for,
    served,
    submitted_or_over,
    usable,
)
from tests.support.network.http_client import post
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode, links_to
from tests.support.processes.stub_pooling_node import StubPoolingNode

UPDATE = "/update_weights_from_disk"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
START_PROFILE, STOP_PROFILE = "/start_profile", "/stop_profile"
PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


async def test_all_nodes_are_paused_and_resumed(pair):
    prefill, decode = pair.prefill, pair.decode
    done = await pair.post(PAUSE, mode="retract")
    assert (done.status, done.json) == (200, {"status": "paused", "aborted": 3})
    assert (prefill.paused, decode.paused) == ("retract", "retract")
    again = await pair.client.stub.Pause(router_pb2.PauseRequest())
    assert (again.fresh, prefill.paused) == (False, "abort")
    done = await pair.post(CONTINUE)
    assert (done.status, done.json) == (200, {"status": "continued"})
    assert (prefill.paused, decode.paused) == ("", "")
    assert not (await pair.client.stub.Continue(router_pb2.ContinueRequest())).was_paused
    done = await pair.post(FLUSH)
    assert (done.status, done.json) == (200, {"status": "flushed", "pages_freed": 4})


async def test_if_one_node_cannot_be_paused_those_paused_now_are_resumed(pair):
    pair.prefill.refuses_pauses = "it is in a step that takes longer"
    refused = await pair.post(PAUSE)
    assert refused.status == 409
    assert refused.error["message"] == (
        f"prefill node {pair.prefill.address}: it is in a step that takes longer"
    )
    assert pair.decode.paused == ""
    refused = await pair.post(FLUSH)
    assert (refused.status, refused.error["param"]) == (409, None)
    with pytest.raises(AioRpcError) as caught:
        await pair.client.stub.Pause(router_pb2.PauseRequest(mode="in_place"))
    assert caught.value.code() is StatusCode.FAILED_PRECONDITION


async def test_clients_may_not_command_engines(model, tmp_path):
    keys = tmp_path / "keys"
    new = new_key()
    keys.write_text(f"[{{name: somebody, sha256: {hashed(new)}}}]")
    async with api_for(model, clients=ClientsConfig(api_keys=keys)) as api:
        for path in (*COMMANDS, LOAD, UNLOAD):
            assert (await post(api.router.http_port, path, {})).status == 401
            asked = await post(api.router.http_port, path, {}, authorization=f"Bearer {new}")
            assert asked.status == 403
        assert api.node.paused == ""


async def test_only_web_pages_must_send_a_content_type(api):
    port = api.router.http_port
    assert (await post(port, FLUSH, b"", content_type="")).status == 200
    assert (
        await post(port, FLUSH, b"", content_type="", origin="http://evil.example")
    ).status == 415
    answer = json.loads((await post(port, PAUSE, b"", content_type="")).body)
    assert answer["status"] == "paused"


async def test_a_migration_target_is_chosen_as_if_it_had_no_prefill_nodes(pair):
    """It computes no prompt, and no policy must expect that a prefill node will have its prefix."""
    nodes, decode = pair.router.cluster, pair.decode.address
    await eventually(lambda: [len(choice.prefill) for choice in nodes.usable()] == [1])
    with mock.patch.object(nodes, "_policy", wraps=nodes._policy) as policy:
        placed = nodes.choose_target(PlacementKey([7]), "127.0.0.1:9")
    placed.charge.close()
    ((_, choices),) = [call.args for call in policy.pick.call_args_list]
    assert [(choice.address, choice.prefill) for choice in choices] == [(decode, ())]
    assert placed.decode.address == decode and not placed.prefill


async def test_a_paused_decode_node_gets_requests_only_if_all_are_paused(client, router, d0, d1):
    d0.change_status(paused=True)
    await eventually(lambda: usable(router) == [d1.address])
    calls = [ask(client) for _ in range(4)]
    for _ in calls:
        await d1.complete()
    for call in calls:
        await collect(call)
    with pytest.raises(NodeUnavailable, match="no other decode node is ready"):
        router.cluster.choose_target(PlacementKey([7]), d1.address)
    d1.change_status(paused=True)
    await eventually(lambda: usable(router) == [d0.address, d1.address])
    await client.wait_until_serving()
    calls = [ask(client) for _ in range(2)]
    for node in (d0, d1):
        await node.complete()
    for call in calls:
        await collect(call)
    d0.change_status(paused=False)
    await eventually(lambda: usable(router) == [d0.address])


async def test_a_request_that_only_a_paused_node_can_serve_waits_there(client, router, d0):
    d0.adapters = {"sql": b"s" * 16}
    d0.adapters_changed()
    d0.change_status(paused=True)
    await eventually(lambda: len(usable(router)) == 1 and router.cluster.adapters.by_name())
    call = client.generate("x", adapter="sql")
    await d0.complete()
    await collect(call)


async def test_paused_prefill_nodes_are_hinted_if_all_are_paused(model):
    async with StubNode() as p0, StubNode() as p1:
        prefill = [p0.address, p1.address]
        decode = StubDecodeNode(paired=prefill, serves_alone=False)
        async with served(model, decode, prefill=prefill) as (_, _, router):

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


async def test_requests_wait_for_a_paused_node_that_pairs_again(model, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.0)
    async with pair_for(model, serves_alone=False) as pair:
        router, decode = pair.router, pair.decode
        decode.change_status(paused=True, links=[])
        await eventually(lambda: not router.cluster.ready)
        answer = asyncio.create_task(collect(ask(pair.client)))
        await eventually(lambda: answer.done() or router.admission.num_live)
        decode.change_status(paused=False, links=links_to([pair.prefill.address]))
        submit = await submitted_or_over(decode, answer)
        assert submit is not None, answer.exception()
        decode.finish(submit.number)
        await answer


async def test_all_nodes_release_memory_and_restore_it(pair):
    prefill, decode = pair.prefill, pair.decode
    done = await pair.post(RELEASE)
    assert (done.status, done.json) == (200, {"status": "released"})
    assert prefill.away == decode.away == {"kv_cache", "weights"}
    done = await pair.post(RESUME, tags=["weights"])
    assert (done.status, done.json) == (200, {"status": "resumed"})
    assert prefill.away == decode.away == {"kv_cache"}
    await pair.client.stub.ResumeMemory(router_pb2.ResumeMemoryRequest())
    assert not prefill.away | decode.away
    await pair.client.stub.ReleaseMemory(router_pb2.ReleaseMemoryRequest(tags=["weights"]))
    assert prefill.away == decode.away == {"weights"}


async def test_if_one_node_keeps_its_memory_all_do(pair):
    pair.prefill.refuses_pauses = "this node has requests: pause it first"
    refused = await pair.post(RELEASE)
    assert refused.status == 409
    assert refused.error["message"] == (
        f"prefill node {pair.prefill.address}: this node has requests: pause it first"
    )
    assert not pair.decode.away


async def test_all_nodes_are_profiled_and_report_the_paths_of_their_traces(pair):
    nothing = await pair.post(STOP_PROFILE)
    assert nothing.status == 409
    assert "no profile is running" in nothing.error["message"]
    begun = await pair.post(START_PROFILE, num_steps=7)
    assert (begun.status, begun.json["status"]) == (200, "profiling")
    assert (pair.prefill.profiled, pair.decode.profiled) == (7, 7)
    ended = await pair.post(STOP_PROFILE)
    reported = {each["role"]: each for each in ended.json["profiles"]}
    assert reported == {
        node.description.role: {
            "role": node.description.role,
            "address": node.address,
            "path": f"/traces/{node.description.role}",
        }
        for node in (pair.prefill, pair.decode)
    }


INVALID = [
    (PAUSE, {"mode": "wait"}, "mode"),
    (PAUSE, {"mode": 1}, "mode"),
    (PAUSE, {"mod": "abort"}, "mod"),
    (CONTINUE, {"mode": "abort"}, "mode"),
    *[
        (path, {"tags": tags}, "tags")
        for path in (RELEASE, RESUME)
        for tags in (["cuda_graph"], ["weights"] * 9, "weights")
    ],
    (START_PROFILE, {"num_steps": 0}, "num_steps"),
    (START_PROFILE, {"num_steps": 1001}, "num_steps"),
    (START_PROFILE, {"output_dir": "/tmp"}, "output_dir"),
    (START_PROFILE, {"with_stack": True}, "with_stack"),
    (UPDATE, {}, "model_path"),
    (UPDATE, {"model_path": ""}, "model_path"),
    (UPDATE, {"model_path": "x" * 1025}, "model_path"),
    (UPDATE, {"model_path": "x", "load_format": "gguf"}, "load_format"),
    (UPDATE, {"model_path": "x", "flush_cache": False}, "flush_cache"),
    (UPDATE, {"model_path": "x", "weight_version": "7"}, "weight_version"),
    (LOAD, {"lora_path": "a"}, "lora_name"),
    (LOAD, {"lora_name": "x"}, "lora_path"),
    (LOAD, {"lora_name": "", "lora_path": "a"}, "lora_name"),
    (LOAD, {"lora_name": "-x", "lora_path": "a"}, "lora_name"),
    (LOAD, {"lora_name": "x" * 129, "lora_path": "a"}, "lora_name"),
    (LOAD, {"lora_name": "x=y", "lora_path": "a"}, "lora_name"),
    (LOAD, {"lora_name": "x", "lora_path": "a" * 1025}, "lora_path"),
    (LOAD, {"lora_name": "x", "lora_path": "a", "load_inplace": True}, "load_inplace"),
]


async def test_an_invalid_command_is_rejected_by_name_and_reaches_no_node(api):
    for path, asked, param in INVALID:
        assert await api.refused(path, **asked) == (400, param)
        node = api.node
        assert not (node.paused or node.away or node.prepared or node.adapters)
        assert node.profiled is None
