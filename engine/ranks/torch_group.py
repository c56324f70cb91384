"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs of several hosts and for
tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed

from common.errors import RankLost
from common.process.network import OwnAddress
from engine.ranks.meeting import Meeting

TorchBackend: TypeAlias = Literal["gloo", "nccl"]

_api: Any = distributed  # its process groups have no annotations


class TorchGroup:
    """A Group of ranks that find each other through a store. Connections are not authenticated.

    Sums and broadcasts overwrite their input. With NCCL, all calls are enqueued on the current
    stream, and the host waits for none of them. A CUDA graph may contain them after one call
    outside a graph, which connects the ranks. If a rank times out, a thread of torch ends this
    process. The process should end by os._exit, because NCCL does not disconnect while there are
    graphs.

    Args:
        meeting: rendezvous of the ranks of the node.
        name: name of this group, unique in the node.
        timeout_s: longest wait for another rank.
    """

    def __init__(
        self,
        backend: TorchBackend,
        rank: int,
        size: int,
        meeting: Meeting,
        name: str,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        # By default NCCL would use a stream of its own.
        self._sum = _in_order(_api.AllreduceOptions())
        self._gathering = _in_order(_api.distributed_c10d.AllgatherOptions())
        self._sending = [_in_order(_api.BroadcastOptions()) for _ in range(size)]  # by sender
        for sender, options in enumerate(self._sending):
            options.rootRank = sender
        make = _nccl if backend == "nccl" else _gloo
        with _faults():
            store, timeout = meeting.store(name, size), timedelta(seconds=timeout_s)
            self._group = make(store, meeting.interface, rank, size, timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        with _faults():
            _finish(self._group.allreduce([x], self._sum))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size * len(x), *x.shape[1:])
        with _faults():
            _finish(self._group._allgather_base(whole, x, self._gathering))
        return torch.cat(whole.chunk(self.size), dim=-1)

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        with _faults():
            _finish(self._group.broadcast([x], self._sending[sender]))
        return x

    def close(self) -> None:
        pass


def _in_order(options: Any) -> Any:
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Wait for a call of gloo. NCCL calls that are in stream order return None."""
    if work is not None:
        work.wait()


def _gloo(store: Any, interface: OwnAddress, rank: int, size: int, timeout: timedelta) -> Any:
    options = _api.ProcessGroupGloo._Options()
    options._devices = [_api.ProcessGroupGloo.create_device(hostname=interface.host)]
    options._timeout = timeout
    return _api.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, interface: OwnAddress, rank: int, size: int, timeout: timedelta) -> Any:
    # Connections of NCCL are not authenticated. Tensors inside a host do not use this interface.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.interface}")
    options = _api.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _api.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"a rank has ended or is late: {str(error).splitlines()[0]}") from error
