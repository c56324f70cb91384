"""Collectives of torch.distributed (gloo), the reference of tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from common.errors import RankLost

_api: Any = distributed  # its process groups have no annotations


class GlooGroup:
    """A Group of ranks that find each other by a file, and connect over loopback.

    Args:
        store: path of a file that does not exist yet, in a directory that only this user can read.
        timeout_s: longest wait for another rank.
    """

    def __init__(self, rank: int, size: int, store: Path, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        options = _api.ProcessGroupGloo._Options()
        options._devices = [_api.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timeout
        with _faults():
            self._group = _api.ProcessGroupGloo(
                _api.FileStore(str(store), size), rank, size, options
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        with _faults():
            self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _faults():
            self._group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        sent = x.clone()
        with _faults():
            self._group.broadcast(sent, sender).wait()
        return sent

    def close(self) -> None:
        pass


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"a rank has ended or is late: {str(error).splitlines()[0]}") from error
