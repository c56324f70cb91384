"""The router as a process: what it imports, how it starts, how it ends."""

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import StatusCode

from common import rpc
from common.identity.secret import new_secret, operator_keys, parse
from protos.decode_pb2 import FINISH_REASON_STOP
from protos.router_pb2 import DrainRouterRequest, GetClusterRequest
from protos.router_pb2_grpc import RouterStub
from tests.api.rig import Client, collect, failure
from tests.support.cluster import free_ports
from tests.support.http_client import connected, post, request
from tests.support.programs import Program
from tests.support.stub_decode_node import StubDecodeNode

ABSENT = "127.0.0.1:1"
ANY_PORTS = ("--port", "0", "--http-port", "0")


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_router_serves_and_ends_with_exit_code_0(
    model: Path, programs: list[Program], number: signal.Signals
) -> None:
    async with StubDecodeNode() as node:
        router = Program("router", "--model", str(model), "--decode", node.address, *ANY_PORTS)
        programs.append(router)
        async with rpc.make_channel(router.address()) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x", request_id="named")
            submit = await node.submitted()
            node.say({submit.number: [66]}, ended={submit.number: FINISH_REASON_STOP})
            assert (await collect(call))[0] == "a"
        router.send(number)
        assert router.exit_code() == 0
        assert " label=named outcome=stop tokens=1" in router.output


async def test_an_operator_ends_a_router_which_is_then_waited_for_as_after_a_signal(
    model: Path, programs: list[Program], tmp_path: Path
) -> None:
    """With the operators' key, though others on this host may ask what it knows without."""
    secret = tmp_path / "secret"
    secret.write_text(new_secret())
    (key,) = operator_keys(parse(secret.read_text(), "the test", "operator"))
    shown = (("authorization", f"Bearer {key}"),)
    arguments = ("--model", str(model), "--decode", ABSENT, *ANY_PORTS)
    router = Program("router", *arguments, f"--secret-file={secret}")
    programs.append(router)
    async with rpc.make_channel(router.address()) as channel:
        stub = RouterStub(channel)
        await stub.GetCluster(GetClusterRequest(), timeout=60)
        refused = await failure(stub.Drain(DrainRouterRequest(), timeout=60))
        assert refused.code() is StatusCode.UNAUTHENTICATED
        in_turn = DrainRouterRequest(in_turn=True)
        refused = await failure(stub.Drain(in_turn, timeout=60, metadata=shown))
        assert refused.code() is StatusCode.FAILED_PRECONDITION
        await stub.Drain(DrainRouterRequest(), timeout=60, metadata=shown)
    assert router.exit_code() == 0


def mappings(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_router_loads_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, router.__main__; "
        "print([m for m in ('torch', 'triton', 'transformers', 'nixl', 'engine')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return str(response.read(), "utf-8")


async def test_metrics_count_requests_and_tokens(model: Path, programs: list[Program]) -> None:
    (port,) = free_ports(1)
    async with StubDecodeNode() as node:
        arguments = ("--decode", node.address, *ANY_PORTS, "--metrics-port", str(port))
        router = Program("router", "--model", str(model), *arguments)
        programs.append(router)
        async with rpc.make_channel(router.address()) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x")
            submit = await node.submitted()
            node.say({submit.number: [66, 67]}, ended={submit.number: FINISH_REASON_STOP})
            await collect(call)
            await failure(client.generate())
            lines = (await asyncio.to_thread(scraped, port)).splitlines()
    for line in (
        'baton_requests_total{outcome="stop"} 1.0',
        'baton_requests_rejected_total{reason="invalid"} 1.0',
        "baton_inflight_requests 0.0",
        "baton_generated_tokens_total 2.0",
        "baton_time_to_first_token_seconds_count 1.0",
        "baton_inter_token_latency_seconds_count 1.0",
    ):
        assert line in lines


async def test_a_live_router_has_mapped_no_torch(model: Path, programs: list[Program]) -> None:
    async with StubDecodeNode() as node:
        arguments = ("--model", str(model), "--decode", node.address, *ANY_PORTS)
        router = Program("router", *arguments, forked=False)
        programs.append(router)
        async with rpc.make_channel(router.address()) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x")
            submit = await node.submitted()
            node.say({submit.number: [66]}, ended={submit.number: FINISH_REASON_STOP})
            await collect(call)
            mapped = mappings(router.pid)
        assert "tokenizers" in mapped
        assert "libtorch" not in mapped


async def test_a_second_signal_does_not_wait_for_live_requests(
    model: Path, programs: list[Program]
) -> None:
    async with StubDecodeNode() as node:
        arguments = ("--model", str(model), "--decode", node.address, *ANY_PORTS)
        router = Program("router", *arguments, forked=False)
        programs.append(router)
        async with rpc.make_channel(router.address()) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x")
            await node.submitted()
            router.send(signal.SIGINT)
            await client.wait_until_serving(False)
            router.send(signal.SIGINT)
            assert router.exit_code() == 0
            call.cancel()


def test_a_second_router_on_a_port_is_one_clear_line(model: Path, programs: list[Program]) -> None:
    first = Program("router", "--model", str(model), "--decode", ABSENT, *ANY_PORTS)
    programs.append(first)
    port = first.address().rpartition(":")[2]
    second = Program(
        "router", "--model", str(model), "--decode", ABSENT, *ANY_PORTS, "--port", port
    )
    programs.append(second)
    assert second.exit_code() == 2
    assert second.output.splitlines()[-1].startswith("baton serve router: --port: cannot listen on")
    assert "Traceback" not in second.output


def test_an_http_port_that_is_taken_is_one_clear_line(model: Path, programs: list[Program]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("--model", str(model), "--decode", ABSENT, "--port", "0", "--http-port", port)
        router = Program("router", *arguments)
        programs.append(router)
        assert router.exit_code() == 2
    assert router.output.splitlines()[-1].startswith(
        "baton serve router: --http-port: cannot listen on"
    )
    assert "Traceback" not in router.output


async def test_http_clients_are_served_to_the_end_at_sigterm(
    model: Path, programs: list[Program]
) -> None:
    async with StubDecodeNode() as node:
        router = Program("router", "--model", str(model), "--decode", node.address, *ANY_PORTS)
        programs.append(router)
        async with rpc.make_channel(router.address()) as channel:
            await Client(channel).wait_until_serving()
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
                node.say({number: [66]}, ended={number: FINISH_REASON_STOP})
                (event,) = (await busy.response()).events
                assert event["choices"][0]["text"] == "a"
        assert router.exit_code() == 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--decode", ABSENT], "--model is required"),
        (["--model", "/absent", "--decode", ABSENT], "no such directory"),
        (["--model", "MODEL"], "at least one decode node"),
        (["--model", "MODEL", "--decode", "nonsense"], "host:port"),
        (["--model", "MODEL", "--decode", "dns:nonsense"], "--decode: 'dns:nonsense'"),
        (["--model", "MODEL", "--decode", "file:/absent"], "cannot read /absent: No such file"),
        (["--model", "MODEL", "--decode", ABSENT, "--prefill", ABSENT], "named twice"),
        (
            ["--model", "MODEL", "--decode", ABSENT, "--request-timeout-s", "0"],
            "--request-timeout-s",
        ),
        (["--model", "MODEL", "--decode", ABSENT, "--api-keys", "/absent"], "--api-keys: /absent"),
        (["--model", "MODEL", "--decode", ABSENT, "--isolate-cache-by-key"], "needs --api-keys"),
        (["--model", "MODEL", "--decode", ABSENT, "--cors-origins", "a.b"], "--cors-origins"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    model: Path, programs: list[Program], arguments: list[str], sentence: str
) -> None:
    named = [str(model) if argument == "MODEL" else argument for argument in arguments]
    router = Program("router", *named)
    programs.append(router)
    assert router.exit_code() == 2
    assert sentence in router.output
    assert len(router.output.splitlines()) == 1
