"""Several router processes on one port: real processes, real signals."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import rpc
from common.errors import ConfigError
from protos.decode_pb2 import FINISH_REASON_STOP
from protos.router_pb2 import DrainRouterRequest, GetClusterRequest
from protos.router_pb2_grpc import RouterStub
from tests.api.rig import Client, collect, eventually
from tests.support.http_client import post
from tests.support.programs import Program
from tests.support.stub_decode_node import StubDecodeNode, Submission

ABSENT = "127.0.0.1:1"
ANY_PORTS = ("--port", "0", "--http-port", "0")
START_S = 180.0


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.close()


class Rig:
    """A router of several processes, which this one's stub node answers."""

    def __init__(self, model: Path, decode: str, *flags: str, processes: int = 2) -> None:
        arguments = ("--model", str(model), "--decode", decode, *ANY_PORTS, *flags)
        self.program = Program("router", *arguments, "--processes", str(processes))

    def wait_until_up(self) -> None:
        self.program.line_with("all router processes started", START_S)

    def port(self, field: str) -> int:
        """address or http, of the line in which a process says where it listens."""
        line = self.program.line_with(" listening ", START_S)
        return int(line.partition(f" {field}=")[2].split()[0].rpartition(":")[2])

    def pids(self) -> list[int]:
        """Return the process ids of the worker processes."""
        path = Path(f"/proc/{self.program.pid}/task/{self.program.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


async def test_two_processes_serve_one_port_and_end_together(
    model: Path, programs: list[Program]
) -> None:
    seen: list[Submission] = []

    def answer(submit: Submission) -> None:
        seen.append(submit)
        node.say({submit.number: [66]}, ended={submit.number: FINISH_REASON_STOP})

    async with StubDecodeNode(on_submit=answer) as node:
        rig = Rig(model, node.address)
        programs.append(rig.program)
        await asyncio.to_thread(rig.wait_until_up)
        assert len(rig.pids()) == 2
        await eventually(lambda: len(node.streams) == 2)
        port, http_port = rig.port("address"), rig.port("http")
        async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            await client.wait_until_serving()
            assert (await collect(client.generate("x")))[0] == "a"
        for _ in range(8):  # each on a connection of its own
            async with asyncio.timeout(START_S):
                while True:  # a process may not know yet what its decode node is
                    wanted = {"prompt": "x", "max_tokens": 1}
                    answered = await post(http_port, "/v1/completions", wanted)
                    if answered.status != 503:
                        break
                    await asyncio.sleep(0.02)
            assert answered.json["choices"][0]["text"] == "a"
        assert len({submit.request_id for submit in seen}) == 9
        rig.program.send(signal.SIGTERM)
        assert await asyncio.to_thread(rig.program.exit_code) == 0
        assert rig.program.output.count(" stopped") == 2


async def test_a_process_that_is_killed_is_started_again(
    model: Path, programs: list[Program]
) -> None:
    async with StubDecodeNode() as node:
        rig = Rig(model, node.address)
        programs.append(rig.program)
        await asyncio.to_thread(rig.wait_until_up)
        victim, other = rig.pids()
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(rig.program.line_with, "router process ended")
        async with asyncio.timeout(START_S):
            while len(node.streams) < 2 or len(pids := rig.pids()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert other in pids and victim not in pids
        rig.program.send(signal.SIGTERM)
        assert await asyncio.to_thread(rig.program.exit_code) == 0


async def test_an_operator_renews_them_in_turn_under_a_request_and_ends_them_all(
    model: Path, programs: list[Program]
) -> None:
    async with StubDecodeNode() as node:
        rig = Rig(model, node.address)
        programs.append(rig.program)
        await asyncio.to_thread(rig.wait_until_up)
        before = rig.pids()
        address = f"127.0.0.1:{rig.port('address')}"
        async with rpc.make_channel(address) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x")
            submit = await node.submitted()
            await client.stub.Drain(DrainRouterRequest(in_turn=True), timeout=START_S)
            # Of a process that drains, or its successor: none of the requests.
            await asyncio.to_thread(rig.program.line_with, "router process restarted process=0")
            await asyncio.to_thread(rig.program.line_with, " draining ", START_S)
            node.say({submit.number: [66]}, ended={submit.number: FINISH_REASON_STOP})
            assert (await collect(call))[0] == "a"
        await asyncio.to_thread(rig.program.line_with, "all router processes restarted", START_S)
        after = rig.pids()
        assert len(after) == 2 and not set(before) & set(after)
        assert "router process ended" not in rig.program.output
        async with rpc.make_channel(address) as channel:
            stub: Any = RouterStub(channel)
            state = (await stub.GetCluster(GetClusterRequest(), timeout=START_S)).router
            assert state.processes == 2 and state.oldest_process_s < state.uptime_s
            await stub.Drain(DrainRouterRequest(), timeout=START_S)
        assert await asyncio.to_thread(rig.program.exit_code) == 0


@pytest.mark.parametrize(
    "flag, start, second",
    [
        ("--port", "baton serve router: --port: cannot listen", "1"),
        ("--http-port", "baton serve router: --http-port: cannot", "2"),
    ],
)
def test_another_router_on_the_port_of_several_is_one_clear_line(
    model: Path, programs: list[Program], flag: str, start: str, second: str
) -> None:
    rig = Rig(model, ABSENT)
    programs.append(rig.program)
    rig.wait_until_up()
    taken = str(rig.port("address" if flag == "--port" else "http"))
    other = Program(
        *("router", "--model", str(model), "--decode", ABSENT, *ANY_PORTS),
        *(flag, taken, "--processes", second),
    )
    programs.append(other)
    assert other.exit_code() == 2
    assert other.output.splitlines()[-1].startswith(start)
    assert "Traceback" not in other.output


def test_what_no_process_can_start_with_is_said_once(
    tmp_path: Path, programs: list[Program]
) -> None:
    rig = Rig(tmp_path, ABSENT, processes=3)
    programs.append(rig.program)
    assert rig.program.exit_code() == 2
    assert (
        len(
            [
                line
                for line in rig.program.output.splitlines()
                if line.startswith("baton serve router:")
            ]
        )
        == 1
    )


def test_a_port_that_is_reserved_is_only_for_those_who_share_it() -> None:
    with rpc.reserved("127.0.0.1", 0) as port:
        with pytest.raises(ConfigError, match="Address already in use"):
            with rpc.reserved("127.0.0.1", port):
                pass
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
        with socket.socket() as sharing:  # as gRPC's server and asyncio's do
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("127.0.0.1", port))
            sharing.listen()
            with socket.create_connection(("127.0.0.1", port)):
                sharing.accept()[0].close()
    # That connection lingers, which must not keep the next router out.
    with rpc.reserved("127.0.0.1", port):
        pass
