"""Starts and stops the processes of a measured system on this machine."""

import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc.aio

from bench.errors import UnusableRun
from bench.systems import started
from cli.local import plan
from cli.local.system import LocalSystem
from common.rpc import make_channel
from protos.router_pb2 import ClusterNode, GetClusterRequest, GetModelRequest
from protos.router_pb2_grpc import RouterStub

READY_S = 90.0
_PARTS = ("front", "engine")

Mode = Literal["disaggregated", "colocated"]


@dataclass(frozen=True, slots=True)
class System:
    """A running router, and the nodes behind it."""

    name: str
    target: str
    router_pid: int

    async def vocabulary(self) -> int:
        async with make_channel(self.target) as channel:
            model = await _router(channel).GetModel(GetModelRequest(), timeout=10)
        return int(model.vocabulary_size)

    async def nodes(self) -> list[ClusterNode]:
        async with make_channel(self.target) as channel:
            cluster = await _router(channel).GetCluster(GetClusterRequest(), timeout=10)
        return list(cluster.nodes)

    async def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time so far of each process on this machine, by name."""
        pids = {"router": self.router_pid}
        for node in await self.nodes():
            names = (f"{node.role} {part}" for part in _PARTS)
            pids |= dict(zip(names, node.pids, strict=False))  # no pids: the node is unreachable
        return {name: cpu_seconds_of(pid) for name, pid in pids.items()}


@contextlib.asynccontextmanager
async def serving(
    mode: Mode,
    model: Path,
    node_flags: Sequence[str],
    *,
    prefill_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
) -> AsyncIterator[System]:
    """Start a router, a decode node and, if disaggregated, a prefill node. Yields when they serve.

    Args:
        prefill_flags: additional flags of the prefill node.

    Raises:
        SystemExit: they do not start. Contains the end of a log.
    """
    programs = _programs(mode, model, node_flags, prefill_flags, router_flags)
    async with _running(programs) as running:
        yield System(mode, programs[0].address, running.pid("router"))


@contextlib.asynccontextmanager
async def as_up(
    mode: Mode,
    model: Path | str,
    node_flags: Sequence[str] = (),
    *,
    device: str = "cpu",
    router_model: str = "",
    num_encode: int = 0,
) -> AsyncIterator[System]:
    """Start a system with the flags of `baton up`.

    It has one decode node and, if disaggregated, one prefill node. Unlike in `baton up`, no request
    is rejected for a long queue, because benchmarks need long queues. Raises SystemExit as
    `serving` does.

    Args:
        router_model: directory of the router's files. "": `model`.
        num_encode: number of encode nodes.
    """
    router, prefill, decode, encode = (int(end.rpartition(":")[2]) for end in free_addresses(4))
    wish = plan.RequestedSystem(
        models=(
            plan.RequestedModel(
                str(model),
                plan.RequestedNodes(1 if mode == "disaggregated" else 0),
                plan.RequestedNodes(1),
                router_model=router_model,
                encode=plan.RequestedNodes(num_encode),
            ),
        ),
        host=plan.HOST,
        port=router,
        http_port=0,
        prefill_port=prefill,
        decode_port=decode,
        encode_port=encode,
        metrics_port=None,
        device=device,
        node_flags=tuple(node_flags),
        router_flags=("--max-queue-fraction=1",),
    )
    programs = plan.programs(wish)
    async with _running(programs) as running:
        yield System(mode, programs[0].address, running.pid("router"))


@contextlib.asynccontextmanager
async def prefilling(model: Path, flags: Sequence[str]) -> AsyncIterator[str]:
    """Start one prefill node. Yields its address. Raises SystemExit as `serving` does."""
    (address,) = free_addresses(1)
    node = _node("prefill", address, model, flags)
    async with _running([node]):
        yield address


@contextlib.asynccontextmanager
async def _running(programs: Sequence[plan.Program]) -> AsyncIterator[LocalSystem]:
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))
        try:
            system = started("the system", programs, Path(logs), READY_S)
            yield await stack.enter_async_context(system)
        except UnusableRun as error:
            raise SystemExit(str(error)) from None


def _router(channel: grpc.aio.Channel) -> Any:
    return RouterStub(channel)  # type: ignore[no-untyped-call]


def _programs(
    mode: Mode,
    model: Path,
    node_flags: Sequence[str],
    prefill_flags: Sequence[str],
    router_flags: Sequence[str],
) -> list[plan.Program]:
    router, decode, prefill = free_addresses(3)
    nodes = [_node("decode", decode, model, [f"--mode={mode}", *node_flags])]
    ends = [f"--decode={decode}"]
    if mode == "disaggregated":
        nodes.append(_node("prefill", prefill, model, [*node_flags, *prefill_flags]))
        ends.append(f"--prefill={prefill}")
    port = router.rpartition(":")[2]
    flags = (f"--model={model}", f"--port={port}", "--http-port=0", *ends, *router_flags)
    return [plan.Program("router", "router", router, flags), *nodes]


def _node(role: str, address: str, model: Path, flags: Sequence[str]) -> plan.Program:
    port = address.rpartition(":")[2]
    return plan.Program(
        role, f"{role}_node", address, (f"--model={model}", f"--port={port}", *flags)
    )


def free_addresses(count: int) -> list[str]:
    """Return unused addresses of this machine, host:port."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((plan.HOST, 0))
        return [f"{plan.HOST}:{sock.getsockname()[1]}" for sock in sockets]


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time so far of a process on this machine, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
