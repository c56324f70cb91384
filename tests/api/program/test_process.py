"""The router as a process: its imports, its start and its end."""

import asyncio
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from grpc import StatusCode

from common import rpc
from common.identity.secret import new_secret, operator_keys, parse
from protos.router_pb2 import DrainRouterRequest, GetClusterRequest
from protos.router_pb2_grpc import RouterStub
from tests.api.rig import ABSENT, Client, collect, fails
from tests.support.network.http_client import connected, post, request
from tests.support.processes.cluster import free_ports
from tests.support.processes.programs import Program
from tests.support.processes.stub_decode_node import StubDecodeNode


@asynccontextmanager
async def client_of(router: Program) -> AsyncIterator[Client]:
    """Return a client of a router that is ready."""
    async with rpc.make_channel(router.address()) as channel:
        client = Client(channel)
        await client.wait_until_serving()
        yield client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_router_serves_and_ends_with_exit_code_0(start, number):
    async with StubDecodeNode() as node:
        router = start(decode=node.address)
        async with client_of(router) as client:
            call = client.generate("x", request_id="named")
            await node.complete([66])
            assert (await collect(call))[0] == "a"
        router.send(number)
        assert router.exit_code() == 0
        assert " label=named outcome=stop tokens=1" in router.output


async def test_an_operator_can_end_a_router_which_drains_as_after_a_signal(start, tmp_path):
    """This requires the operators' key, although other callers on this host may query the router
    without one."""
    secret = tmp_path / "secret"
    secret.write_text(new_secret())
    (key,) = operator_keys(parse(secret.read_text(), "the test", "operator"))
    shown = (("authorization", f"Bearer {key}"),)
    router = start(f"--secret-file={secret}")
    async with rpc.make_channel(router.address()) as channel:
        stub = RouterStub(channel)
        await stub.GetCluster(GetClusterRequest(), timeout=60)
        await fails(stub.Drain(DrainRouterRequest(), timeout=60), StatusCode.UNAUTHENTICATED)
        in_turn = DrainRouterRequest(in_turn=True)
        await fails(stub.Drain(in_turn, timeout=60, metadata=shown), StatusCode.FAILED_PRECONDITION)
        await stub.Drain(DrainRouterRequest(), timeout=60, metadata=shown)
    assert router.exit_code() == 0


def mappings(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return str(response.read(), "utf-8")


async def test_metrics_count_requests_and_tokens(start):
    (port,) = free_ports(1)
    async with StubDecodeNode() as node:
        router = start("--metrics-port", str(port), decode=node.address)
        async with client_of(router) as client:
            call = client.generate("x")
            await node.complete([66, 67])
            await collect(call)
            lines = (await asyncio.to_thread(scraped, port)).splitlines()
    assert 'baton_requests_total{outcome="stop"} 1.0' in lines


async def test_a_running_router_has_not_loaded_torch(start):
    async with StubDecodeNode() as node:
        router = start(decode=node.address, forked=False)
        async with client_of(router) as client:
            call = client.generate("x")
            await node.complete([66])
            await collect(call)
            mapped = mappings(router.pid)
        assert "tokenizers" in mapped
        assert "libtorch" not in mapped


async def test_a_second_signal_does_not_wait_for_active_requests(start):
    async with StubDecodeNode() as node:
        router = start(decode=node.address, forked=False)
        async with client_of(router) as client:
            call = client.generate("x")
            await node.submitted()
            router.send(signal.SIGINT)
            await client.wait_until_serving(False)
            router.send(signal.SIGINT)
            assert router.exit_code() == 0
            call.cancel()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_in_use_is_one_clear_line(start, flag):
    with socket.socket() as taken:
        # other processes might share it
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        router = start(flag, str(taken.getsockname()[1]))
        assert router.exit_code() == 2
    last = router.output.splitlines()[-1]
    assert last.startswith(f"baton serve router: {flag}: cannot listen on")
    assert "Traceback" not in router.output


async def test_http_responses_complete_after_sigterm(start):
    async with StubDecodeNode() as node:
        router = start(decode=node.address)
        async with client_of(router):
            http = int(router.line_with("listening").split("http=")[1].split()[0].split(":")[1])
            async with connected(http) as idle, connected(http) as busy:
                await idle.send(request("GET", "/health"))
                await idle.response()
                await busy.post("/v1/completions", {"prompt": "x", "stream": True})
                number = (await node.submitted()).number
                router.send(signal.SIGTERM)
                assert await idle.ended()
                refused = await post(http, "/v1/completions", {"prompt": "x"})
                assert (refused.status, refused.headers["connection"]) == (503, "close")
                node.finish(number, [66])
                (event,) = (await busy.response()).events
                assert event["choices"][0]["text"] == "a"
        assert router.exit_code() == 0


GIVEN = ("--model", "MODEL", "--decode", ABSENT)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--decode", ABSENT], "--model is required"),
        (["--model", "/absent", "--decode", ABSENT], "no such directory"),
        (["--model", "MODEL"], "at least one decode node"),
        (["--model", "MODEL", "--decode", "nonsense"], "host:port"),
        (["--model", "MODEL", "--decode", "dns:nonsense"], "--decode: 'dns:nonsense'"),
        (["--model", "MODEL", "--decode", "file:/absent"], "cannot read /absent: No such file"),
        ([*GIVEN, "--prefill", ABSENT], "named twice"),
        ([*GIVEN, "--request-timeout-s", "0"], "--request-timeout-s"),
        ([*GIVEN, "--api-keys", "/absent"], "--api-keys: /absent"),
        ([*GIVEN, "--isolate-cache-by-key"], "needs --api-keys"),
        ([*GIVEN, "--cors-origins", "a.b"], "--cors-origins"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(model, arguments, sentence):
    named = [str(model) if argument == "MODEL" else argument for argument in arguments]
    with closing(Program("router", *named)) as router:
        assert router.exit_code() == 2
    assert sentence in router.output
    assert len(router.output.splitlines()) == 1
