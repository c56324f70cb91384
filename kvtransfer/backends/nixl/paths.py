"""The one-sided paths that nixl may take, in the order of preference, and what proves each.

UCX takes whichever transport it finds, says nothing of it, and where none of them reads alone it
has the owner's UCX help. So every path has transports of its own, sockets are among none of them,
and no KV goes over a path that is not proved: by reading bytes that only the owner can have told,
and by a first read with an owner that helps nobody, because nobody polls it.

cma, cuda_ipc and nvlink join processes of one host. rdma joins hosts, and has been run on none
yet. There the owner's metadata is believed as far as the pair stream that brought it: UCX ends the
process that is given some forgeries of it. And there the owner is polled while readers connect,
because two ends of a reliable connection have to be told of each other.

Only rdma gives keys that can be taken back. Within a host a reader reads by process id and address,
or maps the whole of a device's memory by a handle that the driver never revokes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_proof import DeviceEvidence, MappedMemory
from kvtransfer.backends.nixl.agent import HOST, Transports
from kvtransfer.backends.path_proof import HostEvidence, SameHost
from kvtransfer.backends.rdma_proof import RdmaEvidence, RdmaPath, devices

_MIB = 1 << 20


class Evidence(Protocol):
    """Something of the owner's that proves the path to who finds it. Kept while it is told."""

    def tell(self, metadata: bytes) -> bytes:
        """What finds it, for a path whose agent has this metadata. Called once."""
        ...


class Proved(Protocol):
    """The reader's end of a proved path. For one thread."""

    path: str  # what carries the bytes, as metrics name it

    def close(self) -> None:
        """After the last read: lets go of what the path needs. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PathKind:
    """One path that nixl may take."""

    name: str
    memory: str  # cpu | cuda: where both pools are
    transports: Transports  # of its agents
    evidence: Callable[[PagePool, PagePool], Evidence]  # of the owner's pool and scratch pages
    prove: Callable[[bytes, bytes, PagePool], Proved]  # of what was told, metadata, reader's pool
    part_bytes: int  # of one read: the time until it is seen that the connection was stopped
    # A detour inside UCX, through the host's memory, stays below; 0: there is none.
    min_gib_per_s: float = 0.0
    # What a reader is told has keys in it, with which it can read until they are taken back: each
    # has an agent of its own at the owner, and they end with it.
    keyed: bool = False


PATHS = (
    # An agent copies 4 MiB of host memory in about 1 ms, inside the call.
    PathKind("cma", "cpu", HOST, HostEvidence, SameHost, 4 * _MIB),
    PathKind(
        "cuda_ipc",
        "cuda",
        Transports("cuda_ipc,cuda_copy,cma,posix", errors="none"),
        DeviceEvidence,
        MappedMemory,
        32 * _MIB,
        min_gib_per_s=2.0,
    ),
    # "rc" means ud as well, but to make contact only.
    PathKind(
        "rdma",
        "cpu",
        Transports("rc,cuda_copy", errors="peer", polled=True, devices=devices),
        RdmaEvidence,
        RdmaPath,
        16 * _MIB,
        keyed=True,
    ),
    # Without GPUDirect RDMA, UCX would go through host memory with the owner's help.
    PathKind(
        "rdma",
        "cuda",
        Transports("rc,cuda_copy,gdr_copy", errors="peer", polled=True, devices=devices),
        RdmaEvidence,
        RdmaPath,
        32 * _MIB,
        min_gib_per_s=2.0,
        keyed=True,
    ),
)


def kind_of_memory(device: str) -> str:
    """cpu or cuda."""
    return device.partition(":")[0]
