"""The one-sided paths that NIXL may use, in order of preference, and the proof of each.

UCX picks any transport that it finds and does not report which. If none supports one-sided reads,
UCX falls back to copies by the producer. Therefore each path restricts the transports of its
agents, without sockets, and no KV is read before the path is proved. The proof has two parts.
First, the consumer reads bytes that only the producer can have sent. Then a first read succeeds
although the producer is not polled.

cma, cuda_ipc and nvlink connect processes of one host. rdma connects hosts. It has not run on RDMA
hardware yet, only over other transports of NIXL (docs/security.md). Over rdma, the producer's
metadata is trusted as far as the pair stream that carried it, because UCX aborts the process on
some forged metadata. The producer is also polled while rdma consumers connect, because both ends
take part in setting up a reliable connection.

Only rdma has keys that can be revoked. Within a host, a consumer reads by process id and address,
or maps device memory with a handle that the driver never revokes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_proof import DeviceEvidence, MappedMemory
from kvtransfer.backends.path_proof import HostEvidence, SameHost
from kvtransfer.backends.rdma_proof import RdmaEvidence, RdmaPath, devices

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NixlTransports:
    """The transports that an agent may use, by their UCX names. Overrides the user's environment.

    tcp is never among them: it listens on every interface and lets any sender write to any address.
    UCX needs one transport for messages. On one host this is `posix`, whose memory only this user
    can open, through /proc/<pid>/fd. It is reachable exactly where the other process' memory is.
    `sysv` would also be open to the user's group.
    """

    names: str
    # UCX's error handling for dead peers. UCX rejects posix with "peer". With "none", a read from a
    # dead process still fails, because the kernel reports it.
    errors: Literal["none", "peer"]
    # Whether a producer must be polled while a consumer connects. Not needed over shared memory: a
    # consumer connected to a producer stopped by SIGSTOP, and read from it for 40 s.
    polled: bool = False
    devices: Callable[[], str] = lambda: "all"  # network devices. May raise TransferError


# NIXL rejects an agent without cuda_copy on a machine that has a GPU.
HOST = NixlTransports("cma,posix,cuda_copy", errors="none")


class PathEvidence(Protocol):
    """Bytes in the producer's memory that prove a path to a consumer that reads them. Kept while
    the path is offered.
    """

    def describe(self, metadata: bytes) -> bytes:
        """Return the serialised location of the evidence, for an agent's metadata. Called once."""
        ...


class ProvedPath(Protocol):
    """The consumer's end of a proved path. Not thread-safe."""

    path: str  # name of the data path, as in metrics

    def close(self) -> None:
        """Release the path's resources, after the last read. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PathKind:
    """One path that NIXL may use, with its transports and its proof."""

    name: str
    memory: str  # cpu | cuda: kind of memory of both pools
    transports: NixlTransports  # transports of its agents
    evidence: Callable[
        [PagePool, PagePool], PathEvidence
    ]  # args: the producer's pool and its scratch pages
    # Args: the evidence, the metadata, the consumer's pool.
    prove: Callable[[bytes, bytes, PagePool], ProvedPath]
    part_bytes: int  # size of one read, which bounds how long `stop` takes
    # Lower limit of the probed rate. A detour of UCX through host memory is slower. 0: no limit.
    min_gib_per_s: float = 0.0
    # Whether the description given to a consumer has keys that allow reads until they are revoked.
    # Then the producer creates an agent for each consumer, whose end revokes its keys.
    keyed: bool = False


PATHS = (
    # An agent copies 4 MiB of host memory in about 1 ms, inside the call.
    PathKind("cma", "cpu", HOST, HostEvidence, SameHost, 4 * _MIB),
    PathKind(
        "cuda_ipc",
        "cuda",
        NixlTransports("cuda_ipc,cuda_copy,cma,posix", errors="none"),
        DeviceEvidence,
        MappedMemory,
        32 * _MIB,
        min_gib_per_s=2.0,
    ),
    # "rc" includes ud, used only to set up connections.
    PathKind(
        "rdma",
        "cpu",
        NixlTransports("rc,cuda_copy", errors="peer", polled=True, devices=devices),
        RdmaEvidence,
        RdmaPath,
        16 * _MIB,
        keyed=True,
    ),
    # Without GPUDirect RDMA, UCX would copy through host memory with the producer's help.
    PathKind(
        "rdma",
        "cuda",
        NixlTransports("rc,cuda_copy,gdr_copy", errors="peer", polled=True, devices=devices),
        RdmaEvidence,
        RdmaPath,
        32 * _MIB,
        min_gib_per_s=2.0,
        keyed=True,
    ),
)


def kind_of_memory(device: str) -> str:
    """Return "cpu" or "cuda"."""
    return device.partition(":")[0]
