"""A cluster in virtual time: the real router without HTTP and ports, and simulated nodes."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from api.program.admin import make_admin
from api.program.assembly import make_grpc
from api.program.nodes import ModelPool, RouterBase, make_base, make_pool
from api.text import model_files
from common import rpc
from common.config import NODE_CONFIGS, RouterConfig
from common.errors import ConfigError, EngineFault, ServingError
from common.logs import kv
from common.request import RequestSpec
from common.requests.namespace import as_bytes
from common.requests.sampling import SamplingParams
from node.frontend.engine_link import RoleProgram
from node.frontend.frontend import Node
from node.roles import other, program_of
from protos.node_pb2 import DrainRequest, SwitchRequest
from protos.node_pb2_grpc import NodeStub
from protos.router_pb2 import ContinueRequest, MoveRequest, PauseRequest
from protos.router_pb2_grpc import RouterStub
from router.cluster.cluster_state import NodeReport
from router.generation import Generation
from router.policy.load import RequestDue
from router.token_buffer import UNKNOWN_VERSION, ModelVersion, NodeOutput
from router.workers import OtherProcesses, alone
from simulation.node.engine import SimEngine
from simulation.node.options import check_config
from simulation.node.tokenizer import has_model_files, write_model_files
from simulation.virtual.faults import ROUTER
from simulation.virtual.network import MemoryHost, MemoryNetwork
from simulation.virtual.scenario import Arrival, Scenario

log = logging.getLogger(__name__)

CANCELLED = "ClientCancelled"  # error of a response whose client has disconnected
ROUTER_ADDRESS = "127.0.0.1:50050"  # address that clients call
_FIRST_PORT = 50100
_READY_S = 60.0
_SETTLE_S = 10.0  # seconds after the first node is ready, until all have paired and reported


@dataclass(eq=False)
class Response:
    """The response to a request: the TokenSink of its Generation.

    Attributes:
        times: time.monotonic() of each token.
        version: version of the last token.
        error: name of the error, or CANCELLED. "": none.
        ended_at: time.monotonic() of the end of the request.
    """

    arrival: Arrival
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    version: ModelVersion = UNKNOWN_VERSION
    ended: bool = False
    error: str = ""
    ended_at: float = math.inf

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        """Do nothing: reports do not include the number."""

    def add(self, output: NodeOutput) -> bool:
        self.token_ids += output.token_ids
        self.times += [time.monotonic()] * len(output.token_ids)
        if output.token_ids:
            self.version = output.version
        self.ended = output.end is not None
        return True

    async def flush(self) -> None:
        """Do nothing: this client reads without delay."""


class VirtualNode:
    """A node as a separate host on the network.

    Attributes:
        role: current role.
        killed: `kill` was called, and `restart` was not called since.
        drained: an operator drains it. It ends when its requests have migrated.
    """

    def __init__(self, program: RoleProgram, host: MemoryHost) -> None:
        self._program = program
        self._host = host
        self._engines: list[SimEngine] = []
        self._earlier_busy_s = 0.0  # busy seconds of killed processes
        self._start()

    @property
    def busy_s(self) -> float:
        """Return the seconds that its device has computed."""
        runners = (each.runner for each in self._engines)
        return self._earlier_busy_s + sum(each.busy_s for each in runners if each is not None)

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def problems(self) -> Iterator[str]:
        """Yield each inconsistency in an engine that has no requests."""
        for each in self._engines:
            if (core := each.core) is None:
                continue
            if live := int(core.table.live.sum()):
                yield f"{live} slots are in use"
            try:
                core.pages.check()
            except EngineFault as error:
                yield str(error)

    async def ended(self) -> None:
        """Wait until the node ends on its own."""
        await asyncio.wait({self._task})

    async def freeze(self, seconds: float) -> None:
        """Stop the engine for a time, like a stuck device."""
        for each in self._engines:
            each.moves.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            for each in self._engines:
                each.moves.set()

    async def slow(self, factor: float, seconds: float) -> None:
        """Lengthen the steps of the device for a time, like a throttled GPU."""
        runners = [each.runner for each in self._engines if each.runner is not None]
        for each in runners:
            each.slowness *= factor
        try:
            await asyncio.sleep(seconds)
        finally:
            for each in runners:
                each.slowness /= factor

    async def kill(self) -> None:
        """End the node like `kill -9`: its peers only see that connections end."""
        self.killed = True
        self._host.kill()
        for each in self._engines:
            each.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def restart(self) -> None:
        """Start a new process for a killed node, like its supervisor."""
        if self.killed:
            self._earlier_busy_s = self.busy_s
            self._engines = []
            self._start()

    def _start(self) -> None:
        self.killed = self.drained = False
        self.role: str = self._program.role
        role = partial(other, self._program)
        with rpc.use(self._host):
            node = Node(self._program, self._spawn, role, on_role=self._has_role)
            self._task = asyncio.ensure_future(node.run())

    def _has_role(self, program: RoleProgram) -> None:
        self.role = program.role

    def _spawn(self) -> SimEngine:
        engine = SimEngine(self._host.network.wires_of(self._host.name))
        self._engines.append(engine)
        return engine


class VirtualCluster:
    """A running cluster, which `running` makes.

    Attributes:
        nodes: nodes by the names of Scenario.nodes.
        operator: host on the network from which operators and the planner call.
        page_size: tokens per page.
    """

    def __init__(
        self,
        nodes: Mapping[str, VirtualNode],
        programs: Mapping[str, RoleProgram],
        router: ModelPool,
        network: MemoryNetwork,
    ) -> None:
        self.nodes = nodes
        self.wires = network.wires
        self.operator = MemoryHost("operator", network)
        self.page_size = next(iter(programs.values())).config.engine.cache.page_size
        self._addresses = {name: _address(program) for name, program in programs.items()}
        self._names = network.names
        self._router = router
        self._records = router.records

    async def answer(self, arrival: Arrival) -> Response:
        """Send a request, and return its complete response or its error."""
        now = time.monotonic()
        response = Response(arrival, now)
        budget_s = self._router.config.request_timeout_s
        due = RequestDue(now + budget_s * self._router.config.max_queue_fraction, now + budget_s)
        sampling = SamplingParams(
            max_tokens=arrival.output,
            seed=1,
            ignore_eos=True,
            stop_token_ids=() if arrival.stop is None else (arrival.stop,),
        )
        spec = RequestSpec(
            token_ids=as_bytes(list(arrival.prompt)),
            sampling=sampling,
            request_id=arrival.name,
        )
        cluster = self._router.cluster
        leaving = asyncio.timeout(arrival.leaves_s)
        try:
            async with leaving:
                with self._records.begin(arrival.name, "", "", "") as record:
                    async with asyncio.timeout(budget_s):
                        cluster.check_in_time(due)
                        await Generation(spec, due, response, record, cluster).run()
                    record.finish("length", 0)
        except ServingError as error:
            response.error = type(error).__name__
        except TimeoutError:
            response.error = CANCELLED if leaving.expired() else "TimeoutError"
        except Exception as error:
            log.exception("the router failed %s", kv(request_id=arrival.name))
            response.error = type(error).__name__
        response.ended_at = time.monotonic()
        return response

    async def reports(self) -> dict[str, NodeReport]:
        """Return the router's report of each node by name."""
        reports = await self._router.state.survey()
        return {self._names[each.address]: each for each in reports}

    @property
    def roles(self) -> dict[str, str]:
        return {name: node.role for name, node in self.nodes.items()}

    async def set_role(self, node: str, role: str) -> None:
        await self._call(node, "Switch", SwitchRequest(role=role))

    async def drain(self, node: str) -> None:
        operated = self.nodes[node]
        operated.drained = True
        try:
            await self._call(node, "Drain", DrainRequest())
        except grpc.aio.AioRpcError:
            operated.drained = operated.has_ended  # a node that ends immediately may not respond
            raise

    async def pause(self, node: str, mode: str) -> None:
        await self._call(node, "Pause", PauseRequest(mode=mode))

    async def resume(self, node: str) -> None:
        await self._call(node, "Continue", ContinueRequest())

    async def migrate(self, node: str) -> None:
        """Migrate one of the node's requests. Raises AioRpcError if none can migrate."""
        async with rpc.make_channel(ROUTER_ADDRESS) as channel:
            stub = RouterStub(channel)  # type: ignore[no-untyped-call]
            await stub.Move(MoveRequest(source=self._addresses[node]))

    async def _call(self, node: str, method: str, request: Any) -> None:
        """Call a node as an operator does. Raises AioRpcError if it rejects the call."""
        async with rpc.make_channel(self._addresses[node]) as channel:
            await getattr(NodeStub(channel), method)(request)  # type: ignore[no-untyped-call]

    async def until_ready(self) -> None:
        """Wait until all nodes serve.

        Raises:
            ConfigError: they do not start.
        """
        ready = asyncio.ensure_future(self._router.cluster.until_first_ready())
        ended = [asyncio.ensure_future(node.ended()) for node in self.nodes.values()]
        try:
            done, _ = await asyncio.wait(
                {ready, *ended}, timeout=_READY_S, return_when="FIRST_COMPLETED"
            )
            if done != {ready}:
                raise ConfigError("the nodes cannot start")
        finally:
            for waiting in (ready, *ended):
                waiting.cancel()
        await asyncio.sleep(_SETTLE_S)


@asynccontextmanager
async def running(scenario: Scenario, directory: Path) -> AsyncIterator[VirtualCluster]:
    """Run the cluster of a scenario inside the context.

    Args:
        directory: empty directory for pools and the router's files.

    Raises:
        ConfigError: the nodes do not support the scenario.
    """
    network = MemoryNetwork()
    programs = _programs(scenario, directory / "pools")
    addresses = {name: _address(program) for name, program in programs.items()}
    nodes = {
        name: VirtualNode(program, MemoryHost(name, network)) for name, program in programs.items()
    }
    config = RouterConfig(
        model=str(_files(scenario.cluster.model, directory)),
        prefill=tuple(a for name, a in addresses.items() if name.startswith("prefill")),
        decode=tuple(a for name, a in addresses.items() if not name.startswith("prefill")),
        policy=scenario.policy,
        request_timeout_s=scenario.load.timeout,
    )
    with ExitStack() as resources, rpc.use(MemoryHost(ROUTER, network)):
        base = make_base(config, resources)
        pool = await make_pool(base, config, model_files.load(config.model), resources)
        await _serve(base, pool)
        following = asyncio.ensure_future(pool.membership.run())
        try:
            yield VirtualCluster(nodes, programs, pool, network)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for node in nodes.values():
                await node.kill()


async def _serve(base: RouterBase, pool: ModelPool) -> None:
    """Serve the router's gRPC methods for operators and the planner."""
    pools, others = {pool.name: pool}, OtherProcesses({})
    admin = make_admin(base, pools, CollectorRegistry(), alone(), others, others, lambda: None)
    await make_grpc(base, pools, admin.methods, shares_port=False).server.start()


def _programs(scenario: Scenario, pools: Path) -> dict[str, RoleProgram]:
    cluster, programs = scenario.cluster, {}
    for port, name in enumerate(scenario.nodes, start=_FIRST_PORT):
        kind = name.partition("/")[0]
        role = "prefill" if kind == "prefill" else "decode"
        fields: dict[str, Any] = {
            "server": {"port": port},
            "engine": {
                "model": cluster.model,
                "device": f"sim:{cluster.gpu}",
                "parallel": {"tp": getattr(cluster, f"{role}_tp")},
                "sim": {"link": cluster.path, "pool_dir": pools},
            },
        }
        if kind == "colocated":
            fields["mode"] = "colocated"
        for option, value in cluster.options.items():
            _set(fields, option, value)
        config = NODE_CONFIGS[role].model_validate(fields)
        check_config(config)
        programs[name] = program_of(role, config)
    return programs


def _set(fields: dict[str, Any], option: str, value: Any) -> None:
    """Set an option in the fields of a configuration. Raises ConfigError if it is set already."""
    *path, last = option.split(".")
    for name in path:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            break
    else:
        if last not in fields:
            fields[last] = value
            return
    raise ConfigError(f"cluster.options: {option} is set by another key of the file")


def _address(program: RoleProgram) -> str:
    return rpc.join_address(program.config.announced_host, program.config.server.port)


def _files(model: str, directory: Path) -> Path:
    """Return the directory with the files that the router reads."""
    if has_model_files(model):
        return Path(model)
    write_model_files(model, directory / "model")
    return directory / "model"
