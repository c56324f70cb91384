"""Ctrl-C: a command ends with a sentence and 130 at any point."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos import node_pb2_grpc, router_pb2_grpc
from protos.node_pb2 import DrainResponse
from protos.router_pb2 import ClusterNode, GetClusterResponse, RouterState
from tests.support.network.grpc_calls import serving
from tests.support.processes.programs import ROOT

pytestmark = pytest.mark.slow

WAIT_S = 120.0
WAITS = "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.01)\n"


@contextlib.asynccontextmanager
async def _baton(directory: Path, *arguments: str, beside: Path = ROOT) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *arguments),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{beside}:{ROOT}"},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _interrupted(process: Process) -> str:
    """Return its output. It has written exactly one line to standard error."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(WAIT_S):
        said, complaints = await process.communicate()
    assert process.returncode == 130, complaints.decode()
    (sentence,) = complaints.decode().splitlines()
    assert "interrupted" in sentence
    return said.decode()


async def test_interrupt_during_imports(tmp_path):
    """Seen failing with a traceback."""
    (tmp_path / "grpc.py").write_text(WAITS)
    async with _baton(tmp_path, "requests", "migrate", "r1", beside=tmp_path) as move:
        assert move.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await move.stdout.readline() == b"importing\n"
        assert await _interrupted(move) == ""


class Cluster(router_pb2_grpc.RouterServicer, node_pb2_grpc.NodeServicer):
    """A router and its only node, which drains forever.

    Attributes:
        reached: a caller waits, for a call without an answer or for the end of the drain.

    Args:
        silent: the call that is never answered.
    """

    def __init__(self, *, silent: str = "") -> None:
        self.address = ""
        self.drains = False
        self.reached = asyncio.Event()
        self._silent = silent

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        router = router_pb2_grpc.add_RouterServicer_to_server
        node = node_pb2_grpc.add_NodeServicer_to_server
        async with serving((router, self), (node, self)) as self.address:
            yield

    async def GetCluster(self, request: object, context: object) -> GetClusterResponse:
        await self._answers("GetCluster")
        if self.drains:
            self.reached.set()
        node = ClusterNode(role="decode", address=self.address, state="ready", instance_id=1)
        return GetClusterResponse(nodes=[node], router=RouterState(state="ready"))

    async def Drain(self, request: object, context: object) -> DrainResponse:
        self.drains = True
        await self._answers("Drain")
        return DrainResponse()

    async def _answers(self, method: str) -> None:
        if method == self._silent:
            self.reached.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    "silent, drains, said",
    [
        pytest.param("GetCluster", False, 0, id="before-a-drain", marks=pytest.mark.long),
        pytest.param("Drain", True, 3, id="while-it-is-told", marks=pytest.mark.long),
        pytest.param("", True, 3, id="while-it-drains"),
    ],
)
async def test_interrupt_of_a_rollout(tmp_path, silent, drains, said):
    """No further calls are sent after the interrupt."""
    cluster = Cluster(silent=silent)
    async with cluster.serving():
        router = f"--router={cluster.address}"
        async with _baton(tmp_path, "rollout", router, "--only=decode", "--force") as roll:
            async with asyncio.timeout(WAIT_S):
                await cluster.reached.wait()
            assert len((await _interrupted(roll)).splitlines()) == said
    assert cluster.drains is drains
