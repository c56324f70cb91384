"""Several router processes on one port: real processes, real signals."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.program import assembly
from api.program.assembly import run_router
from api.text import model_files
from common import rpc
from common.config import RouterConfig
from common.errors import ConfigError
from protos.router_pb2 import DrainRouterRequest, GetClusterRequest
from protos.router_pb2_grpc import RouterStub
from router.workers import ProcessSlot
from tests.api.rig import ABSENT, ON_ANY_PORT, Client, collect, eventually
from tests.support.network.http_client import post
from tests.support.processes import fork_server
from tests.support.processes.programs import Program
from tests.support.processes.stub_decode_node import StubDecodeNode, Submission

START_S = 180.0


class Rig:
    """A router of two processes, both up, whose node is this process's stub."""

    def __init__(self, start: Callable[..., Program], decode: str = ABSENT) -> None:
        self.program = start("--processes", "2", decode=decode)
        self.program.line_with("all router processes started", START_S)

    async def line_with(self, words: str) -> None:
        await asyncio.to_thread(self.program.line_with, words, START_S)

    async def ends(self) -> None:
        assert await asyncio.to_thread(self.program.exit_code) == 0

    def port(self, field: str) -> int:
        """Return the address or http of the line in which a process logs its ports."""
        line = self.program.line_with(" listening ", START_S)
        return int(line.partition(f" {field}=")[2].split()[0].rpartition(":")[2])

    def pids(self) -> list[int]:
        """Return the process ids of the worker processes."""
        return fork_server.programs_below(self.program.pid)


async def test_two_processes_serve_one_port_and_end_together(start):
    seen: list[Submission] = []

    def answer(submit: Submission) -> None:
        seen.append(submit)
        node.finish(submit.number, [66])

    async with StubDecodeNode(on_submit=answer) as node:
        rig = await asyncio.to_thread(Rig, start, node.address)
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
        await rig.ends()
        assert rig.program.output.count(" stopped") == 2


async def test_a_killed_process_is_restarted(start):
    async with StubDecodeNode() as node:
        rig = await asyncio.to_thread(Rig, start, node.address)
        victim, other = rig.pids()
        os.kill(victim, signal.SIGKILL)
        await rig.line_with("router process ended")
        async with asyncio.timeout(START_S):
            while len(node.streams) < 2 or len(pids := rig.pids()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert other in pids and victim not in pids
        rig.program.send(signal.SIGTERM)
        await rig.ends()


async def test_an_operator_restarts_them_in_turn_during_a_request_and_ends_them_all(start):
    async with StubDecodeNode() as node:
        rig = await asyncio.to_thread(Rig, start, node.address)
        before = rig.pids()
        address = f"127.0.0.1:{rig.port('address')}"
        async with rpc.make_channel(address) as channel:
            client = Client(channel)
            await client.wait_until_serving()
            call = client.generate("x")
            submit = await node.submitted()
            await client.stub.Drain(DrainRouterRequest(in_turn=True), timeout=START_S)
            # A draining process or its successor may answer: neither has the request.
            await rig.line_with("router process restarted process=0")
            await rig.line_with(" draining ")
            node.finish(submit.number, [66])
            assert (await collect(call))[0] == "a"
        await rig.line_with("all router processes restarted")
        after = rig.pids()
        assert len(after) == 2 and not set(before) & set(after)
        assert "router process ended" not in rig.program.output
        async with rpc.make_channel(address) as channel:
            stub: Any = RouterStub(channel)
            state = (await stub.GetCluster(GetClusterRequest(), timeout=START_S)).router
            assert state.processes == 2 and state.oldest_process_s < state.uptime_s
            await stub.Drain(DrainRouterRequest(), timeout=START_S)
        await rig.ends()


def test_another_router_on_a_port_of_several_is_one_clear_line(start):
    rig = Rig(start)
    for flag, field, processes in (("--port", "address", "1"), ("--http-port", "http", "2")):
        other = start(flag, str(rig.port(field)), "--processes", processes)
        assert other.exit_code() == 2
        assert other.output.splitlines()[-1].startswith(
            f"baton serve router: {flag}: cannot listen"
        )
        assert "Traceback" not in other.output


def test_an_error_that_no_process_can_start_with_is_reported_once(start, tmp_path):
    router = start("--processes", "3", model=tmp_path)
    assert router.exit_code() == 2
    lines = router.output.splitlines()
    assert sum(line.startswith("baton serve router:") for line in lines) == 1


def test_a_reserved_port_is_open_only_to_its_sharers():
    with rpc.reserved("127.0.0.1", 0) as port:
        with pytest.raises(ConfigError, match="Address already in use"):
            with rpc.reserved("127.0.0.1", port):
                pass
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
        with socket.socket() as sharing:  # like gRPC's server and asyncio's
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("127.0.0.1", port))
            sharing.listen()
            with socket.create_connection(("127.0.0.1", port)):
                sharing.accept()[0].close()
    # That connection lingers, which must not block the next router.
    with rpc.reserved("127.0.0.1", port):
        pass


# Successors ---------------------------------------------------------------------------------------


def _config(model: Path, node: str) -> RouterConfig:
    return RouterConfig(server=ON_ANY_PORT, http_port=0, model=str(model), decode=(node,))


def _place(directory: Path) -> ProcessSlot:
    return ProcessSlot(0, 2, str(directory), time.monotonic(), again=True)


async def test_a_process_listens_when_a_request_could_be_placed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "FIRST_LOOK_S", 120.0)
    async with StubDecodeNode() as node, asyncio.timeout(110.0):
        config = _config(model, node.address)
        async with run_router(config, [model_files.load(config.model)], _place(tmp_path)) as router:
            assert router.cluster.usable()


async def test_a_process_listens_nevertheless_if_no_node_answers(model, tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "FIRST_LOOK_S", 0.05)
    config = _config(model, "127.0.0.1:1")
    async with run_router(config, [model_files.load(config.model)], _place(tmp_path)) as router:
        assert router.port and not router.cluster.usable()
