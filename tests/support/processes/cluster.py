"""A whole system as real processes: a router, prefill nodes and decode nodes on free ports.

    async with Cluster(checkpoint, logs, rig=CPU, path="nixl") as cluster:
        answer = await cluster.generate([1, 2, 3], max_tokens=8, temperature=0.0)

Leaving the block checks that nothing leaked and that every running process exits with 0. A failure
inside it includes the last lines of all logs.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
import pytest

from cli import client
from cli.local.plan import Program
from common import tls
from common.config import TlsConfig
from common.identity.program import identity_of
from common.identity.secret import new_secret
from common.process.children import ChildProcess
from common.rpc import make_channel
from protos.node_pb2 import DescribeRequest, DescribeResponse, DrainRequest, SwitchRequest
from protos.node_pb2_grpc import NodeStub
from protos.router_pb2 import (
    ExplainRequest,
    ExplainResponse,
    FlushCacheRequest,
    GenerateRequest,
    GenerateResponse,
    GetClusterRequest,
    GetClusterResponse,
    MoveRequest,
    TokenIds,
    Usage,
)
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling
from tests.support.network.certificates import flags as tls_flags
from tests.support.network.island import Island
from tests.support.network.scrapes import scraped, value
from tests.support.processes import fork_server
from tests.support.processes.programs import ROOT, runs
from tests.support.runner import workers

START_S = 180.0
STOP_S = 120.0
RPC_S = 120.0
COMMAND_S = 600.0
WAIT_S = 120.0  # longest wait of a test, in seconds
POLL_S = 0.02
NUM_PAGES = 512
# No process counts as silent, however slow the test machine makes its heartbeats.
PATIENT_NODE = ("--transfer.max-missed-heartbeats=600", "--engine-heartbeat-timeout-s=600")
PATIENT_ROUTER = ("--suspect-after-s=600", "--dead-after-s=600")
# Environment of a cluster whose engines tests/support/processes/poisoned changes.
POISONED = {"PYTHONPATH": f"{ROOT / 'tests/support/processes/poisoned'}{os.pathsep}{ROOT}"}


@functools.cache
def _candidates(worker: int) -> Iterator[int]:
    """Yield ports of one worker process, below the range of outgoing connections.

    A port is repeated only after all others.
    """
    first = 20000 + worker % 4 * 3000
    ports = range(first, first + 3000)
    return itertools.cycle(random.sample(ports, len(ports)))


def slowed(step_s: float) -> dict[str, str]:
    """Return an environment in which every forward pass takes `step_s` longer.

    With it, a test can act during a response, however fast the engines are.
    """
    return {**POISONED, "STEP_S": str(step_s)}


@dataclass(frozen=True, slots=True)
class Rig:
    """The device of each role."""

    name: str
    prefill_device: str
    decode_device: str


CPU = Rig("cpu", "cpu", "cpu")
ONE_GPU = Rig("one_gpu", "cuda:0", "cuda:0")
TWO_GPU = Rig("two_gpu", "cuda:0", "cuda:1")
RIGS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(ONE_GPU, id="one_gpu", marks=pytest.mark.gpu),
    pytest.param(TWO_GPU, id="two_gpu", marks=pytest.mark.two_gpu),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """The messages of one request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    usage: Usage


@dataclass(slots=True, eq=False)
class Node:
    program: Program
    child: ChildProcess
    stub: Any
    channel: grpc.aio.Channel
    killed: bool = False  # or has ended on its own, as intended

    @property
    def address(self) -> str:
        return self.program.address

    @property
    def engine_pid(self) -> int:
        (engine,) = children_of(self.child.pid)
        return engine

    async def describe(self) -> DescribeResponse:
        return await self.stub.Describe(DescribeRequest(), timeout=RPC_S)

    async def flush_cache(self) -> None:
        await self.stub.FlushCache(FlushCacheRequest(), timeout=RPC_S)

    async def until(
        self, condition: Callable[[DescribeResponse], object], what: str, timeout_s: float = WAIT_S
    ) -> None:
        """Poll until `condition` holds for the node's description."""

        async def holds() -> object:
            return condition(await self.describe())

        await wait_until(holds, f"{self.program.name}: {what}", timeout_s)


async def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until `condition`, a function or a coroutine function, holds. Fails with `what`."""
    end = time.monotonic() + timeout_s
    while True:
        result = condition()
        if await result if inspect.isawaitable(result) else result:
            return
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


class Responses:
    """Responses of a cluster that arrive at the same time.

    Attributes:
        tokens: tokens of each response so far.
    """

    def __init__(self, cluster: "Cluster", requests: Sequence[Mapping[str, Any]]) -> None:
        """Args:
        requests: arguments of `Cluster.stream`.
        """
        self.tokens: list[list[int]] = [[] for _ in requests]
        self._ending = [
            asyncio.create_task(self._receive(cluster.stream(**request), tokens))
            for request, tokens in zip(requests, self.tokens, strict=True)
        ]

    async def until_all_have(self, num_tokens: int) -> None:
        await wait_until(
            lambda: min(map(len, self.tokens)) >= num_tokens, "all responses have begun"
        )

    async def until_one_has(self, num_tokens: int) -> None:
        await wait_until(lambda: max(map(len, self.tokens)) >= num_tokens, "a response has begun")

    async def all(self) -> list[tuple[int, ...]]:
        """Return the tokens of the complete responses."""
        await asyncio.gather(*self._ending)
        return list(map(tuple, self.tokens))

    async def _receive(self, stream: AsyncIterator[GenerateResponse], tokens: list[int]) -> None:
        response = GenerateResponse()
        async for response in stream:
            tokens += response.token_ids
        assert response.finish_reason and response.usage.completion_tokens == len(tokens)


LOOPBACK = "127.0.0.1"


class Cluster:
    """A running system. Use as an async context manager. For one event loop.

    Args:
        paired: wait until the router is ready and every decode node has paired with all nodes.
        by_file: the router reads the nodes' addresses from a file, so that they can change.
        path: required data path of KV: "nixl", "tcp", or "auto".
        node_flags: flags for every node, after the role's own flags.
        flags_of: additional flags of single nodes by name, such as "decode-1".
        tls_config: TLS of every process and of this client. Clients need no certificate.
        with_secret: processes authenticate by a cluster secret from a file, and this client by an
            operator's token.
        canary_tokens: 0: nodes send no canaries, so they do only what the test requests.
        patient: no process counts as dead or unhealthy before it has ended.
        environment: additional environment variables of every process.
        islands: network namespaces of nodes by node name, at most one.
        forked: start processes from the fork server. Their memory cannot be judged: pages that they
            share with the server become private over time.
    """

    def __init__(
        self,
        model: Path,
        logs: Path,
        *,
        rig: Rig = CPU,
        path: str = "auto",
        num_prefill: int = 1,
        num_decode: int = 1,
        num_encode: int = 0,
        router_flags: Sequence[str] = (),
        node_flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        flags_of: Mapping[str, Sequence[str]] | None = None,
        paired: bool = True,
        by_file: bool = False,
        tls_config: TlsConfig | None = None,
        with_secret: bool = True,
        patient: bool = True,
        canary_tokens: int = 0,
        environment: Mapping[str, str] | None = None,
        islands: Mapping[str, Island] | None = None,
        forked: bool = True,
    ) -> None:
        self._forked = forked
        certs = tls_config or TlsConfig()
        self._certificates = tls.certificates(certs, "the test's")
        self.secret_file = logs / "secret"
        secret_flags = []
        if with_secret:
            logs.mkdir(parents=True, exist_ok=True)
            self.secret_file.write_text(new_secret())
            secret_flags = [f"--secret-file={self.secret_file}"]
        shown = self.secret_file if with_secret else None
        self.operator = identity_of("operator", "the test", shown)
        common = (
            f"--transfer.backend={path}",
            f"--transfer.canary-tokens={canary_tokens}",
            *tls_flags("server.tls", certs),
            *secret_flags,
            *(PATIENT_NODE if patient else ()),
            *node_flags,
        )
        base = ("--dtype=float32", *common)
        self._flags = {
            "prefill": (f"--device={rig.prefill_device}", *base, *prefill_flags),
            "decode": (f"--device={rig.decode_device}", *base, *decode_flags),
            "encode": (f"--device={rig.prefill_device}", *base),
        }
        self._flags_of = flags_of or {}
        self._model = model
        self._environment = {**os.environ, **(environment or {})}
        self._islands = islands or {}
        free = free_ports(2 + num_prefill + num_decode + num_encode)
        counts = {"prefill": num_prefill, "decode": num_decode}
        if num_encode:
            counts["encode"] = num_encode
        nodes = [
            self._node_program(role, i, next(free))
            for role, count in counts.items()
            for i in range(count)
        ]
        self.http_port = next(free)
        self._roster = logs / "nodes.yaml" if by_file else None
        self._named = {
            role: [node.address for node in nodes if node.module == f"{role}_node"]
            for role in counts
        }
        self._router_flags = (
            "--max-queue-fraction=1",  # a slow machine must not reject requests
            *tls_flags("server.tls", certs.model_copy(update={"ca": None})),
            *tls_flags("node-tls", TlsConfig(ca=certs.ca)),
            *secret_flags,
            *(f"--{role}={entry}" for role in counts for entry in self._entries(role)),
            *(PATIENT_ROUTER if patient else ()),
            *router_flags,
        )
        self._programs = [self._router_program("router", next(free), self.http_port), *nodes]
        self._logs = logs
        self._must_pair = paired
        self._stopped = False
        self._router: ChildProcess
        self._channel: grpc.aio.Channel
        self._stub: Any
        self.prefill: list[Node] = []
        self.decode: list[Node] = []
        self.encode: list[Node] = []

    async def __aenter__(self) -> Self:
        self._router = self._child(self._programs[0])
        self._channel = make_channel(self.address, self._certificates)
        self._stub = RouterStub(self._channel)  # type: ignore[no-untyped-call]
        for program in self._programs[1:]:
            role = program.module.removesuffix("_node")
            nodes = {"prefill": self.prefill, "decode": self.decode, "encode": self.encode}[role]
            nodes.append(self._node(program))
        try:
            await self._until_ready([self._router, *(node.child for node in self.nodes)])
        except BaseException as error:
            error.add_note(self.last_words())
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._stopped:
                await self.until_nothing_is_held()
                await self._stop()
        except BaseException as fault:
            error = fault
            raise
        finally:
            if error is not None:
                error.add_note(self.last_words())
            await self._end()

    # Processes.

    @property
    def address(self) -> str:
        """Return the router's address."""
        return self._programs[0].address

    @property
    def router_pid(self) -> int:
        return self._router.pid

    @property
    def logs(self) -> dict[str, Path]:
        """Return the log files of all processes, by name."""
        children = [self._router, *(node.child for node in self.nodes)]
        return {child.name: child.log for child in children if child.log is not None}

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode, *self.encode]

    @property
    def live_nodes(self) -> list[Node]:
        return [node for node in self.nodes if not node.killed]

    async def kill(self, node: Node) -> None:
        """Send SIGKILL to the node's server process. Its engine must end on its own."""
        engine = node.engine_pid
        node.killed = True
        node.child.send(signal.SIGKILL)
        await node.child.ended()

        what = f"the engine of {node.program.name} ends with its frontend"
        await wait_until(lambda: not runs(engine), what)

    def freeze(self, node: Node) -> Callable[[], None]:
        """Send SIGSTOP to the engine: the server process runs, but nothing progresses.

        Ended by the returned function, or by `thaw`.
        """
        os.kill(node.engine_pid, signal.SIGSTOP)
        return partial(self.thaw, node)

    def stick(self, node: Node, directory: Path) -> Callable[[], None]:
        """Block the next forward pass of its engine until the returned function is called.

        Args:
            directory: STUCK_DIRECTORY of the cluster's environment.
        """
        file = directory / str(node.engine_pid)
        file.touch()
        return file.unlink

    def thaw(self, node: Node) -> None:
        os.kill(node.engine_pid, signal.SIGCONT)

    async def start_again(self, node: Node) -> Node:
        """Start a new process at a killed node's address. Does not wait for it."""
        (nodes,) = (each for each in (self.prefill, self.decode, self.encode) if node in each)
        await node.channel.close()
        nodes[nodes.index(node)] = renewed = self._node(node.program)
        return renewed

    async def replace_prefill(self) -> None:
        """Kill the prefill node of a cluster of one prefill and one decode node, and replace it.

        Starts a new process at its address once the decode node has noticed the loss. Returns when
        the decode node has paired with it.
        """
        (prefill,), (decode,) = self.prefill, self.decode
        await self.kill(prefill)
        await decode.until(lambda now: not now.links, "it has noticed the end of the dead node")
        await self.start_again(prefill)
        await decode.until(lambda now: now.links, "it has paired again")

    async def until_whole(self) -> None:
        """Wait until all live nodes serve and have paired."""
        async with asyncio.timeout(START_S):
            for node in self.live_nodes:
                await self._until_serving(node.program)
        await wait_until(self._paired, "all nodes are paired", START_S)

    async def kill_router(self) -> None:
        self._router.send(signal.SIGKILL)
        await self._router.ended()

    async def start_router_again(self) -> None:
        """Start a new process at the killed router's addresses. Returns once it is ready."""
        self._router = self._child(self._programs[0])
        async with asyncio.timeout(START_S):
            await self._until_serving(self._programs[0])

    async def join(self, role: str) -> Node:
        """Start one more node, and add it to the router's list once it serves."""
        nodes = self.prefill if role == "prefill" else self.decode
        program = self._node_program(role, len(nodes), next(free_ports(1)))
        nodes.append(node := self._node(program))
        await self._until_serving(program)
        self._named[role].append(program.address)
        self._write_roster()
        return node

    def leave(self, node: Node) -> None:
        """Remove the node from the router's list."""
        for addresses in self._named.values():
            if node.address in addresses:
                addresses.remove(node.address)
        self._write_roster()

    async def drain(self, node: Node) -> None:
        """Drain the node by an operator's call. It must exit with 0."""
        node.killed = True
        await node.stub.Drain(DrainRequest(), timeout=RPC_S)
        await self._orderly_end(node)

    async def terminate(self, node: Node) -> None:
        """Drain the node by SIGTERM, as a supervisor does."""
        node.killed = True
        node.child.send(signal.SIGTERM)
        await self._orderly_end(node)

    async def _orderly_end(self, node: Node) -> None:
        async with asyncio.timeout(STOP_S):
            assert await node.child.ended() == 0

    async def migrate(self, source: Node, target: Node) -> None:
        """Migrate a response from one decode node to another. For clusters without a secret.

        Retries while the response is not running, because it may have just arrived at its node.
        """
        move = MoveRequest(source=source.address, target=target.address)

        async def moved() -> bool:
            try:
                await self._stub.Move(move, timeout=RPC_S)
            except grpc.aio.AioRpcError as error:
                if "is not running" in (error.details() or ""):
                    return False
                raise
            return True

        await wait_until(moved, f"a response has moved to {target.address}")

    async def switch(self, node: Node, role: str) -> None:
        """Change the node's role, until the router knows it and nodes have paired."""
        await node.stub.Switch(SwitchRequest(role=role), timeout=RPC_S)
        await self.until_has_role(node, role)

    async def until_has_role(self, node: Node, role: str) -> None:
        """Wait until the router knows the node in that role, and nodes have paired."""
        for nodes in (self.prefill, self.decode):
            if node in nodes:
                nodes.remove(node)
        (self.prefill if role == "prefill" else self.decode).append(node)

        async def known() -> bool:
            nodes = (await self.describe()).nodes
            found = {each.address: (each.role, each.state) for each in nodes}
            return found[node.address] == (role, "ready") and await self._paired()

        await wait_until(known, f"{node.address} is a {role} node, ready and paired")

    async def stop_with(self, number: signal.Signals) -> None:
        """Send a signal to all live processes at the same time. Each must exit with 0."""
        await self.until_nothing_is_held()
        self._stopped = True
        engines = self._engines()
        children = [self._router, *(node.child for node in self.live_nodes)]
        for child in children:
            os.killpg(child.pid, number)
        async with asyncio.timeout(STOP_S):
            codes = {child.name: await child.ended() for child in children}
        assert set(codes.values()) == {0}, f"exit codes: {codes}"
        assert not any(runs(engine) for engine in engines), "an engine outlives its frontend"

    async def describe(self) -> GetClusterResponse:
        """Return the cluster as the router describes it."""
        return await self._stub.GetCluster(GetClusterRequest(), timeout=RPC_S)

    async def explain(self, name: str) -> ExplainResponse:
        """Return the events of a request, by its id or the client's label."""
        return await self._stub.Explain(ExplainRequest(name=name), timeout=RPC_S)

    async def metric(self, name: str, **labels: str) -> float:
        return value(await asyncio.to_thread(scraped, self.http_port), name, **labels)

    async def baton(
        self, command: str, *arguments: str, secret: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `baton COMMAND ARGUMENTS` as an operator of this cluster, to its end."""
        return await asyncio.to_thread(
            fork_server.run,
            "cli.main",
            *(*command.split(), *arguments, f"--router={self.address}"),
            f"--secret-file={secret or self.secret_file}",
            timeout_s=COMMAND_S,
        )

    async def until_nothing_is_held(self, timeout_s: float = WAIT_S) -> None:
        """Wait until every page of every live node is free or cached, and no request is queued."""
        for node in self.live_nodes:
            try:
                await node.until(lambda now: not held(now), "it lets all pages go", timeout_s)
            except AssertionError as error:
                error.add_note(f"still held: {held(await node.describe())}")
                raise

    async def until_all_have_had_requests(self) -> None:
        """Send requests until every node has had one.

        From then on the router, whose policy must be round_robin, uses all nodes in turn. Before,
        it may not know all nodes yet, because their reports take up to a second.
        """
        asked = itertools.count()

        async def all_have() -> bool:
            await self.generate([1, 2, next(asked) % 256], max_tokens=2, ignore_eos=True)
            counters = [(await node.describe()).counters for node in self.nodes]
            return all(
                counted["handoffs_completed"] or counted["generated_tokens"] for counted in counters
            )

        await wait_until(all_have, "every node has requests")

    # Requests.

    async def generate(self, prompt: Sequence[int] | str, **how: Any) -> Answer:
        """Send a prompt and collect the whole response. For the arguments see `stream`.

        Raises:
            grpc.aio.AioRpcError: the router's error.
        """
        tokens: list[int] = []
        texts: list[str] = []
        last = GenerateResponse()
        async with aclosing(self.stream(prompt, **how)) as responses:
            async for last in responses:
                tokens += last.token_ids
                texts.append(last.text)
        return Answer(tuple(tokens), "".join(texts), last.finish_reason, last.usage)

    async def stream(
        self,
        prompt: Sequence[int] | str,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
        adapter: str = "",
        **sampling: Any,
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yield the response message by message. Leaving the iteration cancels the call.

        Args:
            sampling: fields of Sampling. Greedy by default.
        """
        request = GenerateRequest(
            request_id=request_id,
            cache_salt=cache_salt,
            adapter=adapter,
            sampling=Sampling(**{"temperature": 0.0, **sampling}),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(TokenIds(ids=prompt))
        async with aclosing(self.ask(request)) as responses:
            async for response in responses:
                yield response

    async def ask(
        self, request: GenerateRequest, **how: Any
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yield the response message by message. Leaving the iteration cancels the call.

        Args:
            how: arguments of the call, such as metadata.
        """
        call = self._stub.Generate(request, **how)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    # Internals.

    def _node_program(self, role: str, number: int, port: int) -> Program:
        flags = self._flags[role]
        if not any(flag.startswith("--engine.cache.num-pages") for flag in flags):
            flags = (*flags, f"--engine.cache.num-pages={NUM_PAGES}")
        name = f"{role}-{number}"
        flags = (*flags, *self._flags_of.get(name, ()))
        host = LOOPBACK
        for elsewhere, island in self._islands.items():  # their loopback is separate
            host = island.host if elsewhere == name else island.shore
            flags = (*flags, f"--host={host}", f"--transfer.listen-host={host}")
        return _program(name, f"{role}_node", port, self._model, flags, host)

    def _router_program(self, name: str, port: int, http_port: int) -> Program:
        flags = (f"--http-port={http_port}", *self._router_flags)
        return _program(name, "router", port, self._model, flags)

    def _entries(self, role: str) -> list[str]:
        """Return the node entries of a role in the router's initial configuration."""
        if self._roster is None:
            return self._named[role]
        self._write_roster()
        return [f"file:{self._roster}"]

    def _write_roster(self) -> None:
        assert self._roster is not None, "this cluster's nodes are fixed"
        self._roster.write_text(json.dumps(self._named))

    def _child(self, program: Program) -> ChildProcess:
        log = self._logs / f"{program.name}-{time.monotonic_ns()}.log"
        command = [sys.executable, *program.command[2:]]  # without -P: perhaps not installed
        if program.name in self._islands:
            command = [*self._islands[program.name].there, *command]
        with fork_server.in_use() if self._forked else contextlib.nullcontext():
            return ChildProcess(
                program.name, command, log, environment=self._environment, directory=self._logs
            )

    def _node(self, program: Program) -> Node:
        channel = make_channel(program.address, self._certificates, self.operator)
        stub = NodeStub(channel)  # type: ignore[no-untyped-call]
        return Node(program, self._child(program), stub, channel)

    async def _until_serving(self, program: Program) -> None:
        for service in program.services:
            await client.until_serving(program.address, service, self._certificates)

    async def _until_ready(self, children: Sequence[ChildProcess]) -> None:
        async def ready() -> None:
            async with asyncio.timeout(START_S):
                for program in self._programs[0 if self._must_pair else 1 :]:
                    await self._until_serving(program)
                if self._must_pair:
                    await wait_until(self._paired, "all nodes are paired", START_S)

        tasks = [asyncio.create_task(ready())]
        tasks += [asyncio.create_task(_raise_at_end(child)) for child in children]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _paired(self) -> bool:
        for node in self.decode:
            description = await node.describe()
            owners = {link.peer for link in description.links}
            if description.mode != "colocated" and not owners >= {n.address for n in self.prefill}:
                return False
        return True

    async def _stop(self) -> None:
        """Stop the router, then all nodes at the same time. Each must exit with 0."""
        groups = [[self._router], [node.child for node in self.live_nodes]]
        engines = self._engines()
        for group in groups:
            assert all(child.code is None for child in group), "a program has ended on its own"
            await asyncio.gather(*(child.stop(STOP_S) for child in group))
            codes = {child.name: child.code for child in group}
            assert set(codes.values()) <= {0}, f"exit codes: {codes}"
        assert not any(runs(engine) for engine in engines), "an engine outlives its frontend"

    def _engines(self) -> list[int]:
        return [pid for node in self.live_nodes for pid in children_of(node.child.pid)]

    async def _end(self) -> None:
        """Kill remaining processes, and close the channels."""
        for child in (self._router, *(node.child for node in self.nodes)):
            child.send(signal.SIGKILL)
            await child.ended()
        for channel in (self._channel, *(node.channel for node in self.nodes)):
            await channel.close()

    def last_words(self) -> str:
        """Return the last lines of all logs."""
        children = [self._router, *(node.child for node in self.nodes)]
        return "\n".join(
            f"--- {child.name}, exit code {child.code}: {child.log}\n{child.last_lines(25)}"
            for child in children
        )


def children_of(pid: int) -> list[int]:
    """Return the pids of the running child processes of a process."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end after its name was listed, and even after its file was opened.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += map(int, path.read_text().split())
    return pids


def held(description: DescribeResponse) -> dict[str, int]:
    """Return why a node is not idle: pages held by others than the cache, and queued requests."""
    pages = {
        f"pages of {holder}": number
        for holder, number in description.pages.items()
        if holder not in ("free", "cache") and number
    }
    return pages | {
        f"queue {name}": number for name, number in description.queues.items() if number
    }


def _program(
    name: str, module: str, port: int, model: Path, flags: Sequence[str], host: str = LOOPBACK
) -> Program:
    all_flags = (f"--model={model}", f"--port={port}", *flags)
    return Program(name, module, f"{host}:{port}", all_flags)


def free_ports(count: int) -> Iterator[int]:
    """Yield ports on which nothing listens now."""
    chosen: set[int] = set()
    while len(chosen) < count:
        port = next(_candidates(workers.number()))
        if _is_free(port):
            chosen.add(port)
    return iter(chosen)


def free_row(count: int) -> range:
    """Return `count` consecutive free ports, for processes that count up from the first."""
    while True:
        first = next(_candidates(workers.number()))
        row = range(first, first + count)
        if all(map(_is_free, row)):
            return row


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def _raise_at_end(child: ChildProcess) -> None:
    raise AssertionError(f"{child.name} has ended with code {await child.ended()}")
