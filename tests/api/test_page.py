"""The page's files and the cluster state that the router serves over HTTP."""

import asyncio
import re
from typing import Any, get_args

import pytest

from api.admin.router_state import ClusterEndpoint, plain
from api.page import files
from node.metrics import Role
from protos.router_pb2 import GetClusterRequest, GetClusterResponse
from tests.api.rig import router_for
from tests.support.network.http_client import connected, get, request
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode


async def test_the_page_loads_only_files_of_the_router(api):
    page = await api.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    found = {"/": page}
    open_ends = [page]
    while open_ends:
        text = open_ends.pop().body.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text)
        linked = re.findall(r'(?:src|href)="(/page/[^"]+)"', text)
        imported = re.findall(r'from "\./([^"]+)"', text)
        for path in {*linked, *(f"/page/{name}" for name in imported)} - set(found):
            found[path] = await api.get(path)
            assert found[path].status == 200, path
            open_ends.append(found[path])
    assert set(found) == set(files.routes())
    kinds = {path.rpartition(".")[2]: file.headers["content-type"] for path, file in found.items()}
    assert kinds["js"].startswith("text/javascript")  # browsers accept no other type as a module


async def test_nodes_of_every_role_have_a_list(api):
    page, script = await api.get("/"), await api.get("/page/app.js")
    lists = re.findall(
        r'new Nodes\(byId\("(.*?)"\), byId\("(.*?)"\), "(.*?)"\)', script.body.decode()
    )
    assert sorted(role for _, _, role in lists) == sorted(get_args(Role))
    for name in (name for nodes, number, _ in lists for name in (nodes, number)):
        assert f'id="{name}"' in page.body.decode()


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css"])
async def test_a_file_has_a_content_policy_and_is_sent_only_once(api, path):
    first = await api.get(path)
    assert "default-src 'self'" in first.headers["content-security-policy"]
    assert "unsafe" not in first.headers["content-security-policy"]
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    async with connected(api.router.http_port) as wire:
        for known in (tag, f'"other", W/{tag}'):
            await wire.send(request("GET", path, if_none_match=known))
            answer = await wire.response(to_head=True)
            assert (answer.status, answer.headers["etag"]) == (304, tag)
        await wire.send(request("GET", path, if_none_match='"other"'))
        assert (await wire.response()).body == first.body


async def test_the_cluster_as_json_equals_get_cluster(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        decode.description.instance_id = 2**63 + 1
        decode.description.counters["generated_tokens"] = 2**53
        decode.description.queues["waiting"] = 3
        decode.description.steps = 9
        decode.description.mode = "disaggregated"
        knobs = {
            "decode": [decode.address],
            "prefill": [prefill.address],
            "max_concurrent_requests": 17,
        }
        async with router_for(model, **knobs) as (client, router):
            await client.wait_until_serving()
            said = await client.stub.GetCluster(GetClusterRequest())
            answer = await get(router.http_port, "/cluster")
    assert answer.headers["cache-control"] == "no-store"
    reported = answer.json
    for moving in (said.router, *said.nodes):
        for name in ("uptime_s", "oldest_process_s", "seen_s"):
            if name in moving.DESCRIPTOR.fields_by_name:
                setattr(moving, name, 0.0)
    reported["router"] |= {"uptime_s": 0.0, "oldest_process_s": 0.0}
    for recent in (said.router.recent.window_s, reported["router"]["recent"]["window_s"]):
        assert recent > 0
    said.router.recent.window_s = reported["router"]["recent"]["window_s"] = 0.0
    for node in reported["nodes"]:
        assert node["seen_s"] > 0
        node["seen_s"] = 0.0
    assert reported == plain(said)
    state = {"state": "ready", "reason": "", "live_requests": 0, "max_requests": 17}
    state |= {"context_length": 64, "has_chat_template": True}
    of_all = reported["router"]
    assert of_all["models"] == [{"name": str(model), **state}]
    assert of_all.items() >= {"model": str(model), "processes": 1, **state}.items()
    assert of_all["in_use"] == sorted([prefill.address, decode.address])
    assert of_all["recent"]["ttft"] == {"count": 0, "p50_s": 0.0, "p99_s": 0.0}
    (decoding,) = [node for node in reported["nodes"] if node["role"] == "decode"]
    assert decoding["instance_id"] == str(2**63 + 1)  # as a number JavaScript would round it
    assert decoding["counters"] == {"generated_tokens": 2**53}
    assert (decoding["queues"], decoding["steps"]) == ({"waiting": 3}, 9)
    assert decoding["mode"] == "disaggregated"
    link = {"peer": "127.0.0.1:1", "path": "tcp", "gib_per_s": 2.5, "members": []}
    assert decoding["links"] == [link]


def test_the_json_of_an_empty_cluster_has_every_field():
    assert set(plain(GetClusterResponse())["router"]) == {
        field.name for field in GetClusterResponse().router.DESCRIPTOR.fields
    }


async def test_a_router_that_cannot_place_a_request_reports_why(model):
    async with router_for(model, decode=["127.0.0.1:1"]) as (_, router):
        reported = (await get(router.http_port, "/cluster")).json
    assert reported["router"]["state"] == "not ready"
    assert "no decode node" in reported["router"]["reason"]
    assert [node["state"] for node in reported["nodes"]] == ["unreachable"]


async def test_many_viewers_do_not_increase_the_calls_to_nodes(node, router):
    before = node.num_described
    answers = await asyncio.gather(*(get(router.http_port, "/cluster") for _ in range(32)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert node.num_described < before + 16  # plus the survey's own, several on a slow machine


async def test_a_viewer_that_disconnects_does_not_cancel_the_others_response():
    class SlowReport:
        asked = asyncio.Event()
        answers = asyncio.Event()

        async def make(self) -> GetClusterResponse:
            self.asked.set()
            await self.answers.wait()
            return GetClusterResponse()

    report = SlowReport()
    endpoint: Any = ClusterEndpoint(report)  # type: ignore[arg-type]
    leaving = asyncio.create_task(endpoint(None))
    await report.asked.wait()
    staying = asyncio.create_task(endpoint(None))
    leaving.cancel()
    await asyncio.wait([leaving])
    report.answers.set()
    assert (await staying).body.startswith(b'{"nodes":[]')
