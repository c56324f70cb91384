"""The system under chaos: injection of faults, and checks of its health."""

import asyncio
import contextlib
import os
import signal
import time

import grpc.aio
import msgspec

from cli.operating.fleet import Fleet, paired
from common.identity.secret import operator_keys, parse
from protos.node_pb2 import DrainRequest
from protos.router_pb2 import GetClusterResponse
from tests.attack.verdict import resident_bytes
from tests.chaos.faults import COLLECTIVE_S, Fault
from tests.chaos.keeper import Keeper
from tests.support.network.http_client import get
from tests.support.processes.cluster import Cluster, Node, children_of, wait_until
from tests.support.processes.fork_server import programs_below

NUM_NODES = 2  # of each role
NUM_PROCESSES = 2  # of the router
_RECOVERY_S = 300.0  # the machine may be busy
_LOOK_S = 0.2


class Sample(msgspec.Struct, frozen=True):
    """Resource use of all processes together, in an undisturbed state."""

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int


class Site:
    """For one event loop.

    Attributes:
        complaints: about commands that have failed.
    """

    def __init__(self, cluster: Cluster, keeper: Keeper) -> None:
        self._cluster = cluster
        self._keeper = keeper
        self.complaints: list[str] = []

    async def befall(self, fault: Fault) -> None:
        """Inject the fault and return when it is over. Processes that end are not restarted yet."""
        nodes = self._nodes(fault)
        if fault.ends:
            for node in nodes:
                self._keeper.doom(node)
        match fault.what:
            case "SIGKILL of the frontend":
                nodes[0].child.send(signal.SIGKILL)
            case "SIGKILL of the engine":
                os.kill(nodes[0].engine_pid, signal.SIGKILL)
            case "SIGSTOP of the frontend":
                await _stopped(nodes[0].child.pid, fault.seconds)
            case "SIGSTOP of the engine":
                engine = nodes[0].engine_pid
                if fault.seconds > COLLECTIVE_S and await _has_ranks(nodes[0]):
                    self._keeper.doom(nodes[0])  # another rank may wait for it in a collective
                with contextlib.suppress(ProcessLookupError):  # it has ended with its node
                    await _stopped(engine, fault.seconds)
            case "SIGTERM":
                nodes[0].child.send(signal.SIGTERM)
            case "drain":
                await nodes[0].stub.Drain(DrainRequest(), timeout=60)
            case "role switch":
                await self._be_guest(nodes[0], fault)
                await self._set_role(nodes[0], fault.role)
            case "SIGTERM after a role switch":
                await self._be_guest(nodes[0], fault)
                nodes[0].child.send(signal.SIGTERM)
            case "SIGKILL of a process":
                os.kill(programs_below(self._cluster.router_pid)[0], signal.SIGKILL)
            case "renewal of the processes":
                await self._renew()
            case "SIGKILL of a rank":
                os.kill(await _follower(nodes[0]), signal.SIGKILL)
            case "SIGSTOP of a rank" | "SIGSTOP of a rank that ends its node":
                with contextlib.suppress(ProcessLookupError):  # it has ended with its node
                    await _stopped(await _follower(nodes[0]), fault.seconds)
            case "rolling restart":
                await self._operate("rollout")

    async def instances(self, faults: tuple[Fault, ...]) -> dict[str, int]:
        """Return the instance ids of the nodes that these faults end, by address."""
        ending = {node.address for each in faults if each.ends for node in self._nodes(each)}
        nodes = (await self._look()).nodes
        return {node.address: node.instance_id for node in nodes if node.address in ending}

    async def until_well(self, ended: dict[str, int]) -> None:
        """Wait until every node is ready and paired with all others, and every process of the
        router responds.

        Args:
            ended: instances that must have been replaced.
        """
        cluster = self._cluster
        wanted = {(d.address, p.address) for d in cluster.decode for p in cluster.prefill}

        async def well() -> bool:
            look = await self._look()
            states = {node.state for node in look.nodes} | {look.router.state}
            whole = look.router.processes == NUM_PROCESSES and not look.router.silent_processes
            renewed = all(
                node.instance_id and node.instance_id != ended.get(node.address)
                for node in look.nodes
            )
            return whole and states == {"ready"} and renewed and paired(look) >= wanted

        await wait_until(well, "everything is well again", _RECOVERY_S)

    def sample(self, began: float) -> Sample:
        """Args:
        began: by time.monotonic().
        """
        fronts = [self._cluster.router_pid, *(node.child.pid for node in self._cluster.nodes)]
        pids = [*fronts, *(child for pid in fronts for child in children_of(pid))]
        return Sample(
            time.monotonic() - began,
            sum(map(resident_bytes, pids)),
            sum(_entries(pid, "fd") for pid in pids),
            sum(_entries(pid, "task") for pid in pids),
        )

    async def counted(self, *names: str) -> dict[str, float]:
        """Return the router's metrics whose names start with this prefix."""
        text = (await get(self._cluster.http_port, "/metrics")).body.decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(names))
        return {what: float(value) for what, _, value in lines}

    def _nodes(self, fault: Fault) -> list[Node]:
        if fault.role == "all":
            return self._cluster.nodes
        nodes: list[Node] = getattr(self._cluster, fault.role, [])
        return nodes[fault.number : fault.number + 1]

    async def _renew(self) -> None:
        """Return when all of the router's processes are new."""
        secret = self._cluster.secret_file.read_text()
        (key,) = operator_keys(parse(secret, "the secret", "operator"))
        fleet = Fleet((("authorization", f"Bearer {key}"),), None, None)
        since = time.monotonic()
        await fleet.drain_router(self._cluster.address, in_turn=True)
        await fleet.until_router_back(self._cluster.address, since, _RECOVERY_S)

    async def _be_guest(self, node: Node, fault: Fault) -> None:
        """Keep the node in the other role for this time, whatever faults hit nodes of that role."""
        (other,) = {"prefill", "decode"} - {fault.role}
        await self._set_role(node, other)
        await asyncio.sleep(fault.seconds)  # part of the fault, not a wait for something

    async def _set_role(self, node: Node, role: str) -> None:
        await self._operate("nodes", "set-role", node.address, role, "--force")

    async def _operate(self, *command: str) -> None:
        """Run `baton COMMAND` as an operator."""
        ended = await self._cluster.baton(*command, f"--timeout={_RECOVERY_S}")
        if code := ended.returncode:
            words = ended.stdout + ended.stderr
            self.complaints.append(f"baton {' '.join(command)} has ended with {code}: {words}")

    async def _look(self) -> GetClusterResponse:
        """Return the cluster's state from a router. Retries if one of its processes has just
        ended."""
        async with asyncio.timeout(_RECOVERY_S):
            while True:
                try:
                    return await self._cluster.describe()
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(_LOOK_S)


def _entries(pid: int, kind: str) -> int:
    """Return 0 for a process that has just ended."""
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir(f"/proc/{pid}/{kind}"))
    return 0


async def _has_ranks(node: Node) -> bool:
    return len((await node.describe()).pids) > 2


async def _follower(node: Node) -> int:
    """Return a process of a node with several ranks, other than its frontend and its engine."""
    return list((await node.describe()).pids)[2]


async def _stopped(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)  # part of the fault, not a wait for something
    finally:
        os.kill(pid, signal.SIGCONT)
