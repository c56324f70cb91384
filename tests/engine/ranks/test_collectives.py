"""Collectives between ranks in separate processes: in shared memory, by gloo and by NCCL."""

import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.ranks import torch_group
from engine.ranks.meeting import LoopbackMeeting
from engine.ranks.shm import memory_bytes
from engine.ranks.torch_group import TorchGroup
from tests.support.processes import fork_server

KINDS = ("shm", "gloo")
PATIENCE_S = 120.0


class Ranks:
    """Processes that run one scenario."""

    def __init__(self, scenario: str, kind: str, size: int, store: Path, timeout_s: float) -> None:
        environment = {**os.environ}
        self.programs, sockets, self._outputs = [], [], []
        for _ in range(size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output = tempfile.TemporaryFile()  # noqa: SIM115
            standard = theirs.fileno(), output.fileno(), 2
            module = "tests.support.engine.rank_program"
            with theirs:
                self.programs.append(
                    fork_server.start(module, [scenario], environment, Path.cwd(), standard)
                )
            sockets.append(ours)
            self._outputs.append(output)
        memory = os.memfd_create("ranks")
        os.truncate(memory, memory_bytes(size))
        pidfds = [os.pidfd_open(program.pid) for program in self.programs]
        for rank, ours in enumerate(sockets):
            place = {"rank": rank, "size": size, "kind": kind, "timeout_s": timeout_s}
            others = [pidfd for other, pidfd in enumerate(pidfds) if other != rank]
            text = json.dumps(place | {"store": str(store)}).encode()
            socket.send_fds(ours, [text], [memory, *others])
            ours.close()
        for file in (memory, *pidfds):
            os.close(file)

    def result(self, rank: int) -> str:
        assert self.programs[rank].wait(PATIENCE_S) == 0
        self._outputs[rank].seek(0)
        text: str = json.loads(self._outputs[rank].read())
        return text

    def close(self) -> None:
        for program, output in zip(self.programs, self._outputs, strict=True):
            program.kill()
            program.wait()
            output.close()


@contextlib.contextmanager
def ranks(
    scenario: str, kind: str, size: int, directory: Path, timeout_s: float = 60.0
) -> Iterator[Ranks]:
    running = Ranks(scenario, kind, size, directory / "store", timeout_s)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(
    "kind, size",
    [
        *itertools.product(KINDS, [2]),
        ("shm", 4),
        pytest.param("gloo", 4, marks=pytest.mark.long),
        pytest.param("nccl", 2, marks=pytest.mark.two_gpu),
    ],
)
def test_all_ranks_get_the_same_bits_of_the_right_results(
    kind: str, size: int, tmp_path: Path
) -> None:
    with ranks("compare", kind, size, tmp_path) as running:
        assert len({running.result(rank) for rank in range(size)}) == 1


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_ends_the_waits_of_the_others_at_once(
    kind: str, size: int, tmp_path: Path
) -> None:
    with ranks("killed", kind, size, tmp_path) as running:
        last = size - 1
        assert running.programs[last].wait(PATIENCE_S) == -signal.SIGKILL
        began = time.monotonic()
        errors = {running.result(rank) for rank in range(last)}
        assert time.monotonic() - began < 20
        expected = f"rank {last} has ended" if kind == "shm" else "a rank has ended"
        assert all(expected in error for error in errors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_rank_ends_the_waits_of_the_others_at_their_deadline(
    kind: str, tmp_path: Path
) -> None:
    with ranks("frozen", kind, 2, tmp_path, timeout_s=5.0) as running:
        expected = "rank 1 is 5 s late" if kind == "shm" else "is late"
        assert expected in running.result(0)


class FakeNccl:
    """A torch process group on GPUs: calls are enqueued in order, and there is nothing to wait
    for."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.made.append((rank, size, options._timeout, os.environ["NCCL_SOCKET_IFNAME"]))

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0] *= 2

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        assert (options.asyncOp, options.rootRank) == (False, 0)

    def _allgather_base(self, whole: Tensor, x: Tensor, options: Any) -> None:
        assert not options.asyncOp
        whole.copy_(torch.cat((x, -x)))


def test_calls_of_nccl_are_made_in_order_and_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # restored in the end
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(torch_group.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    group = TorchGroup("nccl", 1, 2, LoopbackMeeting(tmp_path), "store", 7.0)
    assert FakeNccl.made == [(1, 2, timedelta(seconds=7), "=lo")]
    x = torch.arange(6.0).view(3, 2)
    assert group.all_gather(x).tolist() == torch.cat((x, -x), dim=1).tolist()
    assert group.broadcast(x) is x
    assert group.all_reduce(x) is x
    assert x.flatten().tolist() == [0, 2, 4, 6, 8, 10]
