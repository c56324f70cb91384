"""Simulated reads of other nodes' pages, which take the modelled time. All on the event loop.

Each node has one port, through which its reads pass one after the other. A page is torn if it
changes while it is read: the copy equals neither state. A Wire is the condition of the network
between two nodes, which simulations with faults change.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import LayoutMismatch, Overloaded, TransferError
from kvtransfer.backends.base import Ints
from kvtransfer.messages import HandoffId
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import LinkMember, PagesToRead
from kvtransfer.transfer.link import (
    SLOWEST,
    LinkClosed,
    LinkUp,
    Notify,
    PageLink,
    ReadEnded,
)
from simulation.cost import StepCost
from simulation.device.witness import Words, torn
from simulation.node.pools import open_pool


@dataclass(frozen=True, slots=True)
class Wire:
    """Network condition in one direction between two processes.

    Attributes:
        factor: factor of all delays and of the duration of reads.
        is_cut: connections end, and new ones are rejected.
        is_silent: packets vanish without an error.
    """

    factor: float = 1.0
    is_cut: bool = False
    is_silent: bool = False

    def __or__(self, other: "Wire") -> "Wire":
        """Return the condition with both faults."""
        return Wire(
            self.factor * other.factor,
            self.is_cut or other.is_cut,
            self.is_silent or other.is_silent,
        )


HEALTHY = Wire()
# Returns the condition between this node and the node at an address.
WireTo = Callable[[str], Wire]


def healthy(address: str) -> Wire:
    """Return the condition of a network without faults."""
    return HEALTHY


BACKEND = "simulated"
GIB = 1 << 30
_MAX_JOBS = 4096  # reads of one link
_CONNECT_S = 5.0
_RESEND_S = 0.2  # seconds until vanished packets are sent again
_METRIC_PATHS = {"nvlink": "nvlink", "rdma400": "rdma", "tcp100": "tcp", "tcp25": "tcp"}


class SimOffers:
    """Offers the pages of this node to all consumers on this host."""

    def __init__(self, pool_name: bytes) -> None:
        self._paths = (DataPath(BACKEND, pool_name),)

    def prepare(self, consumer: int) -> Sequence[Future[Any]]:
        return ()

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        return self._paths

    def dismiss(self, consumer: int) -> None:
        """Do nothing: a consumer that has mapped the file keeps it."""

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        return ()

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Do nothing: a read of withdrawn pages is detected by wrong tokens."""

    def poll(self) -> None:
        """Do nothing: no connection needs it."""

    def close(self) -> Sequence[Future[Any]]:
        """Do nothing: the engine owns the pool."""
        return ()

    def open(self) -> Sequence[Future[Any]]:
        return ()


@dataclass(slots=True, eq=False)
class ReadPort:
    """The network port of a node, through which its reads pass one after the other.

    Attributes:
        page_bytes: bytes of a real page, which determine the time of a read.
        path: see StepCost.transfer_s.
        pool: pages of this node.
        pool_directory: directory of the pools of all nodes.
        wire_to: network to other nodes.
        read_timeout_s: seconds that a read may take beyond ten times its normal duration.
        free_at: time.monotonic() of the end of the last read.
    """

    cost: StepCost
    page_bytes: int
    path: str
    pool: Words
    pool_directory: Path
    wire_to: WireTo = healthy
    read_timeout_s: float = 5.0
    free_at: float = 0.0

    @property
    def gib_per_s(self) -> float:
        return 1.0 / self.cost.transfer_s(GIB, self.path)

    def take(self, num_pages: int, factor: float) -> tuple[float, float, float]:
        """Reserve the port for a read. Returns its start, end and deadline in time.monotonic().

        Args:
            factor: factor of the read's duration.
        """
        begin = max(self.free_at, time.monotonic())
        seconds = self.cost.transfer_s(num_pages * self.page_bytes, self.path)
        self.free_at = begin + factor * seconds
        return begin, self.free_at, begin + self.read_timeout_s + seconds / SLOWEST


class SimLinks:
    """Opens links to producers on this host."""

    def __init__(self, port: ReadPort) -> None:
        self._port = port

    def check(self, hello: PairHello) -> None:
        if len(hello.regions) != 1:
            raise LayoutMismatch(f"{hello.peer} cannot pair: it has several ranks")

    def open(self, hello: PairHello, backend: str, notify: Notify) -> PageLink:
        return SimLink(self._port, hello, backend, notify)


@dataclass(slots=True, eq=False)
class _Job:
    handoff: HandoffId
    pages: PagesToRead
    begin: float
    end: float
    deadline: float
    before: Words | None = None  # the source pages when the read began


@dataclass(slots=True)
class _Jobs:
    waiting: deque[_Job] = field(default_factory=deque)  # the first may be in progress
    timer: asyncio.TimerHandle | None = None


class SimLink:
    """Reads pages of one producer, see Link."""

    def __init__(self, port: ReadPort, hello: PairHello, backend: str, notify: Notify) -> None:
        self.producer = hello.instance
        self._port = port
        self._address = hello.address
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._source: Words | None = None  # None: not connected
        self._jobs = _Jobs()
        self._closed = False
        connect_by = time.monotonic() + _CONNECT_S
        self._loop.call_soon(self._connect, hello, backend, connect_by)

    @property
    def deadline(self) -> float | None:
        waiting = self._jobs.waiting
        return waiting[0].deadline if waiting and waiting[0].before is not None else None

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None:
        if self._closed:
            raise TransferError("the link is closed")
        if len(self._jobs.waiting) >= _MAX_JOBS:
            raise Overloaded(f"{_MAX_JOBS} reads are queued on this link")
        taken = self._port.take(len(pages.source), self._wire.factor)
        self._jobs.waiting.append(_Job(handoff, pages, *taken))
        self._set_timer()

    def expect(self, destination_pages: Ints) -> None:
        """Do nothing: the memory is allocated already."""

    def expire(self, now: float) -> None:
        if (deadline := self.deadline) is not None and now >= deadline:
            self.close("a read passed its deadline")

    def join(self, timeout_s: float) -> bool:
        return True

    def close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._jobs.timer is not None:
            self._jobs.timer.cancel()
        unfinished = tuple(job.handoff for job in self._jobs.waiting)
        self._loop.call_soon(self._notify, LinkClosed(reason, unfinished))

    @property
    def _wire(self) -> Wire:
        return self._port.wire_to(self._address)

    def _connect(self, hello: PairHello, backend: str, by: float) -> None:
        if self._closed:
            return
        wire = self._wire
        if wire.is_cut or (wire.is_silent and time.monotonic() >= by):
            self.close("the producer is unreachable")
            return
        if wire.is_silent:
            self._loop.call_later(_RESEND_S, self._connect, hello, backend, by)
            return
        described = {path.backend: path.description for path in hello.paths}
        try:
            if backend not in described:
                raise TransferError("the producer is not a simulated node")
            num_pages = hello.regions[0].num_pages
            directory = self._port.pool_directory
            self._source = open_pool(directory, described[backend], num_pages)
        except TransferError as error:
            self.close(str(error))
            return
        path, rate = _METRIC_PATHS[self._port.path], self._port.gib_per_s
        self._notify(LinkUp(path, rate, (LinkMember(0, 0, path, rate),)))
        self._set_timer()

    def _set_timer(self) -> None:
        """Schedule `_advance` for the next start or end of a read."""
        jobs = self._jobs
        if jobs.timer is None and jobs.waiting and self._source is not None:
            job = jobs.waiting[0]
            at = job.begin if job.before is None else job.end
            jobs.timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._advance)

    def _advance(self) -> None:
        self._jobs.timer = None
        job, wire = self._jobs.waiting[0], self._wire
        assert self._source is not None
        if wire.is_cut:
            self.close("the connection to the producer has ended")
            return
        if job.before is not None and wire.is_silent:
            self._jobs.timer = self._loop.call_later(_RESEND_S, self._advance)
            return
        now_there = self._source[job.pages.source]
        if job.before is None:
            job.before = now_there
        else:
            self._port.pool[job.pages.destination] = torn(job.before, now_there)
            self._jobs.waiting.popleft()
            num_pages = len(job.pages.source)
            num_bytes, seconds = num_pages * self._port.page_bytes, job.end - job.begin
            self._notify(ReadEnded(job.handoff, num_bytes, num_pages, seconds, ""))
        self._set_timer()
