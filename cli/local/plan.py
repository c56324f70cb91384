"""Plans the processes and flags of a whole system on one machine. Starts nothing."""

import ctypes
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config import CacheConfig, TlsConfig
from common.copy_map import ONE_RANK, NodeShape
from common.errors import ConfigError
from common.rpc import join_address
from common.rpc.servers import probe
from engine.processor import threads_at_hand

HOST = "127.0.0.1"
_PORT_FLAGS = {
    "router": "--port",
    "prefill_node": "--prefill-port",
    "decode_node": "--decode-port",
    "encode_node": "--encode-port",
}
# An idle thread sleeps immediately, so that another engine can use its core.
_PASSIVE_WAITS = (("OMP_WAIT_POLICY", "passive"),)
NODE_SERVICE, ROUTER_SERVICE = "baton.v1.Node", "baton.v1.Router"
HTTP_PORT, ROUTER_PORT, PREFILL_PORT, DECODE_PORT, ENCODE_PORT = 8000, 50050, 50100, 50200, 50400
ROLES = ("prefill", "decode", "encode")


@dataclass(frozen=True, slots=True)
class Program:
    """One process to start, with its flags."""

    name: str  # "router", "prefill-0", "decode-1": also the name of its log
    module: str
    address: str  # host:port of its gRPC server
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()  # set in its environment if unset there
    models: tuple[str, ...] = ()  # models that a router serves, if there are several
    nodes: "tuple[Program, ...]" = ()  # simulated nodes that run in this process, if it is a fleet

    @property
    def servers(self) -> "Sequence[Program]":
        """Return the planned processes whose gRPC servers run in this one."""
        return self.nodes or (self,)

    @property
    def services(self) -> Sequence[str]:
        """Return the gRPC services whose health checks show that the process is ready."""
        if self.module != "router":
            return [NODE_SERVICE]
        return [ROUTER_SERVICE, *(f"{ROUTER_SERVICE}/{name}" for name in self.models)]

    @property
    def environment(self) -> dict[str, str]:
        return {**dict(self.variables), **os.environ}

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self.module, *self.flags]


@dataclass(frozen=True, slots=True)
class RequestedNodes:
    """The nodes of one role for one model."""

    count: int  # number of nodes, or of their data-parallel groups
    ranks: NodeShape = ONE_RANK
    dp: int = 1  # nodes in each group, which share experts

    @property
    def total(self) -> int:
        return self.count * self.dp


NO_NODES = RequestedNodes(0)


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """One model and its nodes."""

    model: str
    prefill: RequestedNodes
    decode: RequestedNodes
    served_model_name: str = ""  # "": the name in `model`
    router_model: str = ""  # model whose files the router reads. "": `model`
    encode: RequestedNodes = NO_NODES

    @property
    def name(self) -> str:
        return self.served_model_name or self.model

    def of(self, role: str) -> RequestedNodes:
        return {"prefill": self.prefill, "decode": self.decode, "encode": self.encode}[role]


@dataclass(frozen=True, slots=True)
class RequestedSystem:
    """The system that a user of `baton up` requested."""

    models: tuple[RequestedModel, ...]
    host: str
    port: int  # gRPC port of the router
    http_port: int  # HTTP port of the router
    prefill_port: int  # port of the first prefill node. Others use the next ports
    decode_port: int
    metrics_port: int | None  # metrics port of the router. Nodes use the next ones
    device: str  # auto | cpu | cuda | sim:GPU
    node_flags: tuple[str, ...] = ()  # flags for every node
    router_flags: tuple[str, ...] = ()
    # cert, key and ca for every process, or nothing.
    tls: TlsConfig = field(default_factory=TlsConfig)
    secret_file: Path | None = None  # for every process. None: they get the environment variable
    groups: Path = Path("groups")  # directory for data-parallel groups
    encode_port: int = ENCODE_PORT


@dataclass(frozen=True, slots=True)
class _PlannedNode:
    """A node before its flags are decided."""

    model: RequestedModel
    role: str  # one of ROLES
    number: int  # index among all nodes of this role
    group: int  # index among all groups of this role
    group_rank: int

    @property
    def nodes(self) -> RequestedNodes:
        return self.model.of(self.role)


_DATA_PORT = "--transfer.listen-port"


def programs(wish: RequestedSystem) -> list[Program]:
    """Return the router first, then prefill nodes, decode nodes and encode nodes.

    The decode nodes of a model without prefill nodes are colocated. CUDA devices are assigned to
    the ranks of all nodes in turn, and nodes on one device share its memory. On a CPU, the ranks of
    a role share all cores. Both roles use the same cores, because they rarely compute at the same
    time.

    Raises:
        ConfigError: CUDA is requested but not available, or a node has more ranks than devices.
    """
    planned = [node for role in ROLES for node in _planned(wish, role)]
    nodes = [
        _node(wish, each, number, flags)
        for number, (each, flags) in enumerate(
            zip(planned, _device_flags(wish, planned), strict=True), start=1
        )
    ]
    by_model = {
        model.name: {
            role: [
                node.address
                for each, node in zip(planned, nodes, strict=True)
                if each.model is model and each.role == role
            ]
            for role in ROLES
        }
        for model in wish.models
    }
    router = (
        *_flags(wish, wish.port, 0),
        *_tls_flags("server.tls", wish.tls, "cert", "key"),  # clients need no certificate
        *_tls_flags("node-tls", wish.tls, "ca", "server_name"),
        f"--http-port={wish.http_port}",
        *_model_flags(wish.models, by_model),
        *wish.router_flags,
    )
    address = join_address(wish.host, wish.port)
    models = tuple(by_model) if len(by_model) > 1 else ()
    first = Program("router", "router", address, router, models=models)
    return [first, _fleet(nodes)] if _is_simulated(wish) else [first, *nodes]


def _is_simulated(wish: RequestedSystem) -> bool:
    return wish.device.startswith("sim:")


def _fleet(nodes: Sequence[Program]) -> Program:
    """Return one process that runs all of these simulated nodes."""
    listed = [(node.module.removesuffix("_node"), node.flags) for node in nodes]
    return Program(
        "fleet", "simulation.fleet", nodes[0].address, (json.dumps(listed),), nodes=tuple(nodes)
    )


def _planned(wish: RequestedSystem, role: str) -> Iterator[_PlannedNode]:
    number = first_group = 0
    for model in wish.models:
        nodes = model.of(role)
        for index in range(nodes.total):
            group, rank = divmod(index, nodes.dp)
            yield _PlannedNode(model, role, number, first_group + group, rank)
            number += 1
        first_group += nodes.count


def _node(
    wish: RequestedSystem, node: _PlannedNode, number: int, device_flags: Sequence[str]
) -> Program:
    """Return the process of a node. `number`: its index among all processes."""
    module = f"{node.role}_node"
    first = {"prefill": wish.prefill_port, "decode": wish.decode_port, "encode": wish.encode_port}
    port = first[node.role] + node.number
    has_prefill = bool(node.model.prefill.total)
    flags = (
        f"--model={node.model.model}",
        *_flags(wish, port, number),
        *_tls_flags("server.tls", wish.tls, "cert", "key", "ca", "server_name"),
        *device_flags,
        *group_flags(node.nodes.dp, node.group_rank, wish.groups / f"{node.role}-{node.group}"),
        *(["--mode=colocated"] if node.role == "decode" and not has_prefill else []),
        *wish.node_flags,
        *_own_data_port(module, wish.node_flags),
    )
    shares_cores = has_prefill or len(wish.models) > 1
    return Program(
        f"{node.role}-{node.number}",
        module,
        join_address(wish.host, port),
        flags,
        _PASSIVE_WAITS if shares_cores else (),
    )


def _model_flags(
    models: Sequence[RequestedModel], nodes: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[str]:
    """Return the router's flags for its models.

    Args:
        nodes: node addresses by model and role.
    """
    if len(models) == 1:
        (model,) = models
        name = model.served_model_name
        return [
            f"--model={model.router_model or model.model}",
            *([f"--served-model-name={name}"] if name else []),
            *(f"--{role}={node}" for role, of in nodes[model.name].items() for node in of),
        ]
    entries = (
        {
            "model": each.router_model or each.model,
            "served_model_name": each.name,
            **nodes[each.name],
        }
        for each in models
    )
    return [f"--models={json.dumps(each)}" for each in entries]


def refuse_busy_ports(plan: Sequence[Program]) -> None:
    """Check that the ports of `plan` are free.

    Raises:
        ConfigError: a port is in use. The error names the flag of `baton up` that changes it.
    """
    for program in (server for process in plan for server in process.servers):
        host, _, port = program.address.rpartition(":")
        refuse_busy_port(host.strip("[]"), int(port), program.name, _PORT_FLAGS[program.module])


def refuse_busy_port(host: str, port: int, purpose: str, flag: str) -> None:
    """Check that `port` is free.

    Raises:
        ConfigError: the port is in use. The error names the port, its purpose and the flag.
    """
    if reason := busy(host, port):
        raise ConfigError(
            f"port {port} of {purpose} is not available: {reason} ({flag} chooses another)"
        )


def busy(host: str, port: int) -> str | None:
    """Return why listening on `port` fails, or None if it works."""
    try:
        probe(host, port).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def cuda_devices() -> int:
    """Return the number of CUDA devices that this process may use, without loading torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def _flags(wish: RequestedSystem, port: int, number: int) -> list[str]:
    flags = [f"--host={wish.host}", f"--port={port}"]
    if wish.secret_file is not None:
        flags.append(f"--secret-file={wish.secret_file}")
    if wish.metrics_port is not None:
        flags.append(f"--metrics-port={wish.metrics_port + number}")
    return flags


def _own_data_port(module: str, node_flags: Sequence[str]) -> list[str]:
    """Give all but prefill nodes any free data port, if a data port is requested."""
    asked = any(flag.startswith(_DATA_PORT) for flag in node_flags)
    return [f"{_DATA_PORT}=0"] if asked and module != "prefill_node" else []


def _tls_flags(setting: str, config: TlsConfig, *names: str) -> list[str]:
    """Return the flags of the section `setting` for the fields `names` of `config` that are set."""
    given = config.model_dump(include=set(names), exclude_none=True)
    return [f"--{setting}.{name.replace('_', '-')}={value}" for name, value in given.items()]


def group_flags(dp: int, rank: int, directory: Path) -> list[str]:
    """Return the flags of a node in a group of `dp` nodes, or none for a single node."""
    if dp == 1:
        return []
    flag = "--engine.parallel.dp"
    return [f"{flag}={dp}", f"{flag}-rank={rank}", f"{flag}-group={directory}"]


def _device_flags(wish: RequestedSystem, planned: Sequence[_PlannedNode]) -> list[list[str]]:
    nodes = [each.nodes.ranks for each in planned]
    if _is_simulated(wish):
        return [[f"--device={wish.device}", *rank_flags(ranks)] for ranks in nodes]
    num_devices = 0 if wish.device == "cpu" else cuda_devices()
    if num_devices:
        return _gpu_flags(nodes, num_devices)
    if wish.device == "cuda":
        raise ConfigError("--device cuda: this machine has no CUDA device that can be used")
    num_ranks = Counter[str]()
    for each in planned:
        num_ranks[each.role] += math.prod(each.nodes.ranks)
    threads = max(1, threads_at_hand(os.environ) // max(num_ranks.values()))
    flags = ["--device=cpu", f"--engine.threads={threads}"]
    return [[*flags, *rank_flags(ranks)] for ranks in nodes]


def _gpu_flags(nodes: Sequence[NodeShape], num_devices: int) -> list[list[str]]:
    """Return the device flags of nodes with these ranks."""
    ranks = [math.prod(node) for node in nodes]
    if max(ranks) > num_devices:
        raise ConfigError(
            f"a node of {max(ranks)} ranks needs as many CUDA devices, this machine has "
            f"{num_devices} (--prefill-tp, --decode-tp, --prefill-pp)"
        )
    nodes_per_device = -(-sum(ranks) // num_devices)
    fraction = CacheConfig().memory_fraction / nodes_per_device
    memory = f"--engine.cache.memory-fraction={fraction:.3f}"
    flags, first = [], 0
    for node, num_ranks in zip(nodes, ranks, strict=True):
        gpus = ",".join(str(rank % num_devices) for rank in range(first, first + num_ranks))
        flags.append([f"--device=cuda:{gpus}", memory, *rank_flags(node)])
        first += num_ranks
    return flags


def rank_flags(ranks: NodeShape) -> list[str]:
    """Return the flags for these numbers of ranks."""
    return [
        f"--engine.parallel.{name}={count}" for name, count in ranks._asdict().items() if count > 1
    ]
