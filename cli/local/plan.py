"""Plan the processes and flags of a whole system on one machine. Starts nothing."""

import ctypes
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config import CacheConfig, TlsConfig
from common.copy_map import ONE_RANK, NodeShape
from common.errors import ConfigError
from engine.processor import threads_at_hand

HOST = "127.0.0.1"
_PORT_FLAGS = {
    "router": "--port",
    "prefill_node": "--prefill-port",
    "decode_node": "--decode-port",
}
# An idle thread sleeps at once, so that another engine can use its core.
_PASSIVE_WAITS = (("OMP_WAIT_POLICY", "passive"),)
HTTP_PORT, ROUTER_PORT, PREFILL_PORT, DECODE_PORT = 8000, 50050, 50100, 50200


@dataclass(frozen=True, slots=True)
class Program:
    """One process to start."""

    name: str  # "router", "prefill-0", "decode-1": also the name of its log
    module: str
    address: str  # host:port of its gRPC server
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()  # for its environment, where ours lacks them

    @property
    def environment(self) -> dict[str, str]:
        return {**dict(self.variables), **os.environ}

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self.module, *self.flags]

    @property
    def service(self) -> str:
        """Return the gRPC service whose health check reports that the process is ready."""
        return "baton.v1.Router" if self.module == "router" else "baton.v1.Node"


@dataclass(frozen=True, slots=True)
class RequestedSystem:
    """The system that the user of `baton up` requested."""

    model: str
    prefill: int
    decode: int
    host: str
    port: int  # the router's
    http_port: int  # the router's
    prefill_port: int  # of the first prefill node; the others use the next ones
    decode_port: int
    metrics_port: int | None  # of the router; the nodes use the next ones
    device: str  # auto | cpu | cuda
    node_flags: tuple[str, ...] = ()  # for every node
    router_flags: tuple[str, ...] = ()
    # cert, key and ca for every process, or nothing
    tls: TlsConfig = field(default_factory=TlsConfig)
    secret_file: Path | None = None  # for every process; None: they have the variable
    prefill_ranks: NodeShape = ONE_RANK
    decode_ranks: NodeShape = ONE_RANK
    prefill_dp: int = 1  # nodes of each group, which share experts
    decode_dp: int = 1
    groups: Path = Path("groups")  # directory of the groups
    served_model_name: str = ""  # "": the name in `model`

    @property
    def num_prefill(self) -> int:
        return self.prefill * self.prefill_dp

    @property
    def num_decode(self) -> int:
        return self.decode * self.decode_dp


_DATA_PORT = "--transfer.listen-port"


def programs(wish: RequestedSystem) -> list[Program]:
    """Return the router first, then prefill nodes, then decode nodes.

    Without prefill nodes the decode nodes are colocated. CUDA devices are assigned to the ranks of
    all nodes in turn, and nodes on one device share its memory. On a CPU the ranks of a role share
    its cores. The two roles overlap on the same cores, because they rarely compute at the same
    time.

    Raises:
        ConfigError: CUDA is requested but not available, or a node has more ranks than there are
            devices.
    """
    prefill = [
        (f"prefill-{i}", "prefill_node", wish.prefill_port + i, wish.prefill_dp)
        for i in range(wish.num_prefill)
    ]
    decode = [
        (f"decode-{i}", "decode_node", wish.decode_port + i, wish.decode_dp)
        for i in range(wish.num_decode)
    ]
    nodes = [
        Program(
            name,
            module,
            f"{wish.host}:{port}",
            (
                *_flags(wish, port, number),
                *_tls_flags("server.tls", wish.tls, "cert", "key", "ca", "server_name"),
                *device_flags,
                *_group_flags(wish, name, dp),
                *(["--mode=colocated"] if not prefill else []),
                *wish.node_flags,
                *_own_data_port(module, wish.node_flags),
            ),
            _PASSIVE_WAITS if prefill else (),
        )
        for number, ((name, module, port, dp), device_flags) in enumerate(
            zip(prefill + decode, _device_flags(wish), strict=True), start=1
        )
    ]
    router = (
        *_flags(wish, wish.port, 0),
        *_tls_flags("server.tls", wish.tls, "cert", "key"),  # clients need no certificate
        *_tls_flags("node-tls", wish.tls, "ca", "server_name"),
        f"--http-port={wish.http_port}",
        *([f"--served-model-name={wish.served_model_name}"] if wish.served_model_name else []),
        *(f"--prefill={node.address}" for node in nodes[: wish.num_prefill]),
        *(f"--decode={node.address}" for node in nodes[wish.num_prefill :]),
        *wish.router_flags,
    )
    return [Program("router", "router", f"{wish.host}:{wish.port}", router), *nodes]


def refuse_busy_ports(plan: Sequence[Program]) -> None:
    """Check that the ports of `plan` are free.

    Raises:
        ConfigError: a port of the plan is in use. Names the flag of `baton up` that changes it.
    """
    for program in plan:
        host, _, port = program.address.rpartition(":")
        refuse_busy_port(host, int(port), program.name, _PORT_FLAGS[program.module])


def refuse_busy_port(host: str, port: int, purpose: str, flag: str) -> None:
    """Check that `port` is free.

    Args:
        flag: flag that chooses another port.
    Raises:
        ConfigError: cannot listen on `port` now. Names the port, the purpose and the flag.
    """
    if reason := busy(host, port):
        raise ConfigError(
            f"port {port} of {purpose} is not available: {reason} ({flag} chooses another)"
        )


def busy(host: str, port: int) -> str | None:
    """Return the reason why listening on `port` fails now, or None if it works."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
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
    flags = [f"--model={wish.model}", f"--host={wish.host}", f"--port={port}"]
    if wish.secret_file is not None:
        flags.append(f"--secret-file={wish.secret_file}")
    if wish.metrics_port is not None:
        flags.append(f"--metrics-port={wish.metrics_port + number}")
    return flags


def _own_data_port(module: str, node_flags: Sequence[str]) -> list[str]:
    """Give decode nodes any free data port if one is requested: only a prefill node here can have
    it."""
    asked = any(flag.startswith(_DATA_PORT) for flag in node_flags)
    return [f"{_DATA_PORT}=0"] if asked and module == "decode_node" else []


def _tls_flags(setting: str, config: TlsConfig, *names: str) -> list[str]:
    """Return the flags of the section `setting` for the fields `names` of `config` that are set."""
    given = config.model_dump(include=set(names), exclude_none=True)
    return [f"--{setting}.{name.replace('_', '-')}={value}" for name, value in given.items()]


def _group_flags(wish: RequestedSystem, name: str, dp: int) -> list[str]:
    """Return the flags of a node in a group of `dp` nodes. Consecutive nodes are in one group."""
    role, _, number = name.rpartition("-")
    group, rank = divmod(int(number), dp)
    return group_flags(dp, rank, wish.groups / f"{role}-{group}")


def group_flags(dp: int, rank: int, directory: Path) -> list[str]:
    """Return the flags of a node in a group of `dp` nodes. A node alone has none."""
    if dp == 1:
        return []
    flag = "--engine.parallel.dp"
    return [f"{flag}={dp}", f"{flag}-rank={rank}", f"{flag}-group={directory}"]


def _device_flags(wish: RequestedSystem) -> list[list[str]]:
    nodes = [wish.prefill_ranks] * wish.num_prefill + [wish.decode_ranks] * wish.num_decode
    num_devices = 0 if wish.device == "cpu" else cuda_devices()
    if num_devices:
        return _gpu_flags(nodes, num_devices)
    if wish.device == "cuda":
        raise ConfigError("--device cuda: this machine has no CUDA device that can be used")
    num_ranks = max(
        wish.num_prefill * math.prod(wish.prefill_ranks),
        wish.num_decode * math.prod(wish.decode_ranks),
    )
    threads = max(1, threads_at_hand(os.environ) // num_ranks)
    flags = ["--device=cpu", f"--engine.threads={threads}"]
    return [[*flags, *rank_flags(ranks)] for ranks in nodes]


def _gpu_flags(nodes: Sequence[NodeShape], num_devices: int) -> list[list[str]]:
    """Return the flags of nodes with such ranks."""
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
    """Return the flags of a node with such ranks."""
    return [
        f"--engine.parallel.{name}={count}" for name, count in ranks._asdict().items() if count > 1
    ]
