"""`baton status` and the lists, against a stub router."""

import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from cli.client import UnfinishedRestart
from cli.operating.__main__ import OPERATIONS, parser
from cli.operating.command import Result, json_text, with_fleet
from common.errors import NodeUnavailable
from protos import router_pb2_grpc
from protos.router_pb2 import (
    ClusterNode,
    GetClusterResponse,
    ModelState,
    RankState,
    RouterState,
)
from tests.support.network.grpc_calls import serving

PREFILL = ClusterNode(role="prefill", address="a:1", state="ready", queues={"waiting": 2})
DECODE = ClusterNode(
    role="decode",
    address="b:2",
    state="ready",
    pages={"free": 6, "cache": 1, "request": 3},
    weights=b"\x0a\x0b",
)
PAUSED = ClusterNode(role="decode", address="c\x1b:3", state="paused")
READY = RouterState(
    state="ready",
    model="m",
    live_requests=3,
    max_requests=8,
    processes=1,
    models=[ModelState(name="m", state="ready", context_length=64)],
)
MODEL = {"id": "m", "parent": None, "max_model_len": 64}
HTTP = {
    "/v1/models": {"data": [MODEL, {"id": "sql", "parent": "m", "max_model_len": 64}]},
    "/requests": {
        "requests": [
            {
                "id": "r1",
                "label": None,
                "outcome": "live",
                "arrived": 1.0,
                "seconds": 0.5,
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "decode": "b:2",
            }
        ]
    },
}


class StubRouter(router_pb2_grpc.RouterServicer):
    def __init__(self, answer: GetClusterResponse | Exception) -> None:
        self._answer = answer

    async def GetCluster(self, request, context):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@contextlib.asynccontextmanager
async def _grpc(answer: GetClusterResponse | Exception) -> AsyncIterator[str]:
    add = router_pb2_grpc.add_RouterServicer_to_server
    async with serving((add, StubRouter(answer))) as address:
        yield f"--router={address}"


@contextlib.asynccontextmanager
async def _http(keys: list[str]) -> AsyncIterator[str]:
    async def respond(request: web.Request) -> web.Response:
        keys.append(request.headers.get("authorization", ""))
        if request.path not in HTTP:
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        return web.json_response(HTTP[request.path])

    runner = web.ServerRunner(web.Server(respond))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"--url=http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _run(name: str, *arguments: str) -> Result:
    options = parser(name).parse_args(arguments)
    return await with_fleet(options, OPERATIONS[name].work)


@pytest.mark.parametrize(
    "router, nodes, code",
    [
        (READY, [PREFILL, DECODE], 0),
        (READY, [PREFILL, DECODE, PAUSED], 1),
        (RouterState(state="not ready", reason="no decode node"), [], 1),
    ],
)
async def test_status_exits_with_1_unless_all_are_ready(router, nodes, code):
    async with _grpc(GetClusterResponse(router=router, nodes=nodes)) as flag:
        result = await _run("status", flag)
    assert result.code == code
    assert f"router    {flag.removeprefix('--router=')} {router.state}" in result.text
    assert ("no decode node" in result.text) == bool(router.reason)
    assert ("model     m, context length 64\n" in result.text) == bool(router.models)
    assert ("paused" in result.text) == (PAUSED in nodes)
    assert json.loads(json_text(result.data))["router"]["state"] == router.state


async def test_nodes_are_listed_with_their_models_if_there_are_several():
    router = RouterState(
        state="ready",
        models=[
            ModelState(name="a", state="ready", context_length=64),
            ModelState(name="b", state="not ready", reason="no decode node", context_length=32),
        ],
    )
    nodes = [
        ClusterNode(role="decode", address="a:1", state="ready", served_model="a"),
        ClusterNode(role="decode", address="b:1", state="draining", served_model="b"),
    ]
    async with _grpc(GetClusterResponse(router=router, nodes=nodes)) as flag:
        listed, status = await _run("nodes list", flag), await _run("status", flag)
    assert [line.split()[:3] for line in listed.text.splitlines()] == [
        ["MODEL", "ROLE", "ADDRESS"],
        ["a", "decode", "a:1"],
        ["b", "decode", "b:1"],
    ]
    assert "model     a, context length 64, ready\n" in status.text
    assert "model     b, context length 32, not ready: no decode node\n" in status.text


async def test_lists_of_nodes_are_aligned_and_safe_for_terminals():
    async with _grpc(GetClusterResponse(router=READY, nodes=[PREFILL, DECODE, PAUSED])) as flag:
        nodes, weights = await _run("nodes list", flag), await _run("weights list", flag)
    header, prefill, decode, paused = nodes.text.splitlines()
    assert prefill.split()[:4] == ["prefill", "a:1", "ready", "2"]
    assert decode[header.index("PAGES") :].startswith("3 of 10")
    assert "\x1b" not in paused
    assert [line.split()[2] for line in weights.text.splitlines()[1:3]] == ["of", "0a0b"]
    assert weights.data["nodes"][1]["weights"] == "0a0b"


async def test_ranks_of_nodes_with_several_are_listed():
    ranks = [
        RankState(rank=0, pid=7, device="cpu", memory_bytes=3 << 20, steps_behind=1),
        RankState(rank=1, pid=8, device="c\x1bpu"),
    ]
    split = ClusterNode(role="decode", address="d:4", state="ready", ranks=ranks)
    async with _grpc(GetClusterResponse(router=READY, nodes=[PREFILL, split])) as flag:
        nodes, status = await _run("nodes list", flag), await _run("status", flag)
    header, first, second = nodes.text.splitlines()[-3:]
    assert header.split()[-4:] == ["DEVICE", "MEMORY", "STEPS", "BEHIND"]
    assert first.split() == ["d:4", "0", "7", "cpu", "3.0", "MiB", "1"]
    assert second.split()[-2:] == ["-", "0"]  # it has not reported yet
    assert "\x1b" not in nodes.text
    received = "ranks     2 on 1 of 2 nodes, 3.0 MiB of memory, at most 1 steps behind"
    assert received in status.text.splitlines()
    assert [rank["pid"] for rank in json.loads(json_text(nodes.data))["nodes"][1]["ranks"]] == [
        7,
        8,
    ]


async def test_without_several_ranks_none_are_listed():
    async with _grpc(GetClusterResponse(router=READY, nodes=[PREFILL, DECODE])) as flag:
        nodes, status = await _run("nodes list", flag), await _run("status", flag)
    assert "RANK" not in nodes.text and "ranks" not in status.text


async def test_lists_of_the_http_port_send_the_api_key(monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "k1")
    keys: list[str] = []
    async with _http(keys) as flag:
        requests = await _run("requests list", flag)
        models = await _run("models list", flag)
        adapters = await _run("adapters list", flag)
    assert requests.text.splitlines()[1].split()[:3] == ["r1", "-", "live"]
    assert requests.data == HTTP["/requests"]
    assert [line.split()[0] for line in models.text.splitlines()] == ["NAME", "m", "sql"]
    assert [model["id"] for model in adapters.data] == ["sql"]
    assert keys == ["Bearer k1"] * 3


async def test_an_error_of_the_http_port_is_its_message(monkeypatch):
    monkeypatch.setitem(HTTP, "/requests", None)
    monkeypatch.delitem(HTTP, "/requests")
    async with _http([]) as flag:
        with pytest.raises(UnfinishedRestart, match="404: no such path"):
            await _run("requests list", flag)
    with pytest.raises(UnfinishedRestart, match="--url"):
        await _run("requests list", "--url=127.0.0.1")


async def test_a_router_that_responds_is_not_reported_as_stopped():
    async with _grpc(NodeUnavailable("no decode node is ready")) as flag:
        with pytest.raises(UnfinishedRestart, match="UNAVAILABLE: no decode node is ready"):
            await _run("status", flag)


async def test_nodes_of_groups_are_listed_by_group():
    nodes = [
        ClusterNode(role="decode", address=f"d:{n}", state="ready", group="g\x1b", group_rank=n)
        for n in (1, 0)
    ]
    async with _grpc(GetClusterResponse(router=READY, nodes=[PREFILL, *nodes])) as flag:
        listed = await _run("nodes list", flag)
    header, first, second = listed.text.splitlines()[-3:]
    assert header.split() == ["ROLE", "GROUP", "RANK", "NODE"]
    assert [line.split()[-2:] for line in (first, second)] == [["0", "d:0"], ["1", "d:1"]]
    assert "\x1b" not in listed.text
