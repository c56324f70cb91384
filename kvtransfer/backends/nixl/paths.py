"""The one-sided paths that nixl may use, in order of preference, and the proof of each.

UCX uses any transport that it finds and does not report which one. If no transport reads alone, UCX
uses the producer's help. So every path has transports of its own, none of them is sockets, and no
KV goes over a path before it is proved. The proof has two parts. The consumer reads bytes that only
the producer can have sent. Then a first read succeeds without help of the producer, which is not
polled.

cma, cuda_ipc and nvlink join processes of one host. rdma joins hosts, and has not been run on any
yet. For rdma, the producer's metadata is trusted as far as the pair stream that carried it: UCX
ends the process on some forged metadata. The producer is also polled while consumers connect over
rdma, because both ends of a reliable connection must learn of each other.

Only rdma uses keys that can be revoked. Within a host a consumer reads by process id and address,
or maps all memory of a device by a handle that the driver never revokes.
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
    """All transports that an agent may use, in UCX's words. The user's environment has no effect.

    Never tcp: it listens on every interface and lets any sender write to any address. UCX needs one
    transport for messages. On one host that is `posix`: memory for this user alone, behind
    /proc/<pid>/fd, so without a public name, and unreachable wherever another process' memory is
    unreachable. `sysv` would be open to the group, and reachable where that memory is not.
    """

    names: str
    # UCX's handling of peers that are gone. It refuses posix with "peer". With "none", a read from
    # a process that has ended still fails, because the kernel reports it.
    errors: Literal["none", "peer"]
    # Whether a producer must be polled while a consumer connects. Over shared memory it need not
    # even run: a consumer has connected to, and read for 40 s from, a producer stopped by SIGSTOP.
    polled: bool = False
    devices: Callable[[], str] = lambda: "all"  # of the network. May raise TransferError


# Nixl rejects an agent that cannot recognise GPU memory on a machine that has a GPU.
HOST = NixlTransports("cma,posix,cuda_copy", errors="none")


class PathEvidence(Protocol):
    """Evidence in the producer's memory that proves the path to a consumer that finds it. Kept
    while the offer is valid.
    """

    def describe(self, metadata: bytes) -> bytes:
        """Return what a consumer needs to find it, for a path whose agent has this metadata. Called
        once.
        """
        ...


class ProvedPath(Protocol):
    """The consumer's end of a proved path. For one thread."""

    path: str  # what carries the bytes, as named in metrics

    def close(self) -> None:
        """Release what the path needs, after the last read. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PathKind:
    """One path that nixl may use."""

    name: str
    memory: str  # cpu | cuda: where both pools are
    transports: NixlTransports  # of its agents
    evidence: Callable[
        [PagePool, PagePool], PathEvidence
    ]  # takes the producer's pool and scratch pages
    # Takes the evidence, the metadata and the consumer's pool.
    prove: Callable[[bytes, bytes, PagePool], ProvedPath]
    part_bytes: int  # of one read: bounds the time until a stop of the connection is noticed
    # A detour inside UCX, through host memory, is slower than this. 0: there is no such detour.
    min_gib_per_s: float = 0.0
    # The description given to a consumer has keys, which allow reads until they are revoked. Each
    # consumer has an agent of its own at the producer, and its keys end with the agent.
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
    # "rc" includes ud, but only to make contact.
    PathKind(
        "rdma",
        "cpu",
        NixlTransports("rc,cuda_copy", errors="peer", polled=True, devices=devices),
        RdmaEvidence,
        RdmaPath,
        16 * _MIB,
        keyed=True,
    ),
    # Without GPUDirect RDMA, UCX would go through host memory with the producer's help.
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
