"""The ranks of a node as threads of one process."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from engine.follower import follow
from engine.ranks import Share
from engine.ranks.messages import CaptureGraph, RankJob, StepHeader
from engine.ranks.rank_groups import RankGroups
from engine.ranks.ring import StepRing, ring_memory, whole_pages
from engine.runner.forwards import Forwards
from engine.runner.ranked import LeadingForwards

PATIENCE_S = 120.0
BLOCK_BYTES = whole_pages(1 << 20)
T = TypeVar("T")
Leading = TypeVar("Leading", bound=LeadingForwards)
_relayed = msgspec.msgpack.Decoder(StepHeader | CaptureGraph | RankJob)


class Meeting:
    """Exchanges tensors between the threads of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        assert x.is_contiguous()
        self._parts[rank] = x.clone()
        _settle(x)
        self._barrier.wait()
        parts = [part.clone() for part in self._parts if part is not None]
        _settle(x)
        self._barrier.wait()
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        return parts

    def leave(self) -> None:
        self._barrier.abort()


def _settle(x: Tensor) -> None:
    """Wait for this thread's stream, because another thread's stream will use its tensors."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


class ThreadGroup:
    """A Group whose ranks are threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.rank, x)
        return torch.stack(parts).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), dim=-1)

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        return self._meeting.exchange(self.rank, x)[sender]

    def close(self) -> None:
        pass


def run_ranks(size: int, work: Callable[[Share], T]) -> list[T]:
    """Run `work` as all ranks, in threads, and return the results. A failure ends all."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(Share(rank, size, ThreadGroup(rank, meeting)))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(run, rank) for rank in range(size)]
        failed = [each.exception() for each in running]
    broken = (threading.BrokenBarrierError, type(None))
    for error in failed:
        if not isinstance(error, broken):
            raise error
    return [each.result() for each in running]


class Sender:
    """One follower, as rank 0 sees it."""

    def __init__(self, end: socket.socket) -> None:
        self.steps_sent = self.steps_done = 0
        self._end = end

    def send(self, header: bytes) -> None:
        self.header = _relayed.decode(header)  # as on the way to other hosts
        self._end.send(header, socket.MSG_DONTWAIT)


@contextmanager
def followed(
    first: Forwards,
    second: Forwards,
    meeting: Meeting,
    jobs: Any,
    leading: type[Leading] = LeadingForwards,
) -> Iterator[tuple[Leading, Sender]]:
    """Run the steps of the first of two ranks on the second one, too, in a thread."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ring = StepRing(ring_memory(BLOCK_BYTES), BLOCK_BYTES)
    ours, theirs = (RankGroups(Share(rank, 2), ThreadGroup(rank, meeting)) for rank in range(2))

    def run() -> None:
        try:
            follow(there, ring, second, theirs, jobs)
        finally:
            meeting.leave()
            there.close()

    follower = threading.Thread(target=run)
    follower.start()
    sender: Any = Sender(here)
    try:
        yield leading(first, sender, ours, ring), sender
    finally:
        here.close()
        meeting.leave()
        follower.join(PATIENCE_S)
