"""The one-sided paths that nixl may take, in the order of preference, and what proves each.

UCX takes whichever transport it finds, says nothing of it, and falls back to sockets, over which
a read needs the owner's help and can crash it. So every path has transports of its own, and no KV
goes over one that is not proved: by reading bytes that only the owner can have told, by a rate
that sockets do not reach, or by leaving sockets no way at all.

cma, cuda_ipc and nvlink join processes of one host. rdma joins hosts, and has been run on none
yet. There the owner's metadata is believed as far as the pair stream that brought it: UCX ends the
process that is given some forgeries of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_proof import DeviceEvidence, MappedMemory
from kvtransfer.backends.nixl_agent import HOST_TRANSPORTS
from kvtransfer.backends.path_proof import HostEvidence, SameHost
from kvtransfer.backends.rdma_proof import RdmaEvidence, RdmaPath

_MIB = 1 << 20


class Evidence(Protocol):
    """Something of the owner's that proves the path to who finds it. Kept while it is told."""

    told: bytes


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
    transports: str  # all that its agents may use
    evidence: Callable[[PagePool, PagePool], Evidence]  # of the owner's pool and scratch pages
    prove: Callable[[bytes, PagePool], Proved]  # of what was told, and the reader's pool
    part_bytes: int  # of one read: the time until it is seen that the connection was stopped
    # A fallback to sockets inside UCX stays far below (0.25 to 1.4 GiB/s seen); 0: there is none.
    min_gib_per_s: float = 0.0


PATHS = (
    # An agent copies 4 MiB of host memory in about 1 ms, inside the call.
    PathKind("cma", "cpu", HOST_TRANSPORTS, HostEvidence, SameHost, 4 * _MIB),
    PathKind(
        "cuda_ipc",
        "cuda",
        "cuda_ipc,cuda_copy,cma,tcp",
        DeviceEvidence,
        MappedMemory,
        32 * _MIB,
        min_gib_per_s=2.0,
    ),
    PathKind("rdma", "cpu", "rc,ud,cuda_copy", RdmaEvidence, RdmaPath, 16 * _MIB),
    # Without GPUDirect RDMA, UCX would go through host memory with the owner's help.
    PathKind(
        "rdma",
        "cuda",
        "rc,ud,cuda_copy,gdr_copy",
        RdmaEvidence,
        RdmaPath,
        32 * _MIB,
        min_gib_per_s=2.0,
    ),
)


def kind_of_memory(device: str) -> str:
    """cpu or cuda."""
    return device.partition(":")[0]
