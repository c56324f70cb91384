"""The followers of a node: processes that rank 0 starts, and that end with it.

    start: StartRank -> ... loads ... -> RankLoaded; StartSteps -> RankReady; then headers of steps

A process of rank 0's host, the relay, connects all followers on other hosts. It has one socket per
follower for their messages. It forwards each message on the first socket to all of them.

Rank 0 is a node's engine process. If a follower ends, rank 0 ends, too, and with it the node. A
frozen follower is detected by the timeout of the next collective or, without steps, by a missing
reply to a Ping. A follower that cannot load reports one sentence, which becomes rank 0's error.
"""

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common import logs
from common.config import EngineConfig, ParallelConfig
from common.errors import ConfigError, EngineFault
from common.logs import kv
from common.process.leash import leashed
from common.process.polling import PollSet, poll_ready
from common.process.resources import resident_bytes
from engine.ranks.forking import HELLO
from engine.ranks.job_queue import JobQueue, PendingJob
from engine.ranks.meeting import LoopbackMeeting, NetworkMeeting
from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    EndRanks,
    FromFollower,
    Job,
    JobDone,
    MeasureRank,
    Ping,
    RankFailed,
    RankJob,
    RankLoaded,
    RankMeasured,
    RankReady,
    RankReport,
    RankStarted,
    SampleStep,
    StartRank,
    StartSteps,
    ToFollower,
)
from engine.ranks.rank_groups import RankGroups, group_memories, open_groups
from engine.ranks.ring import StepRing, ring_memory, whole_pages
from engine.ranks.share import Share

_LOAD_S = 3600.0  # seconds to load weights from a slow disk
_CLOSE_S = 3.0  # less than the time after which the frontend kills an engine that does not end
_FORKS_END_S = 0.5  # seconds from the end of a killed fork to the end of all forks
_LOOK_S = 1.0  # seconds between two checks for missing replies
_PATIENCE_S = 5.0  # longer than the timeout of a collective, whose error is better if a step runs

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_from_follower: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFollower)
_Reply = TypeVar("_Reply", RankStarted, RankLoaded, RankMeasured, RankReady)


class PingTimer:
    """Decides when to send a Ping to all followers, and which of them are late with their report.
    Time in which this process was suspended does not count, because the followers may have been
    suspended, too.

    Args:
        silent_s: longest time until a report, in seconds.
    """

    def __init__(self, ranks: Collection[int], silent_s: float) -> None:
        self._ranks = frozenset(ranks)
        self._silent_s = silent_s
        self._missing: set[int] = set()
        self._waited_s = 0.0  # time since the newest Ping
        self._looked = -2 * _LOOK_S  # the first Ping is due at the first look

    def look(self, now: float) -> None:
        """Record the time. Called at least once per second."""
        self._waited_s += min(now - self._looked, 2 * _LOOK_S)
        self._looked = now

    @property
    def is_due(self) -> bool:
        return not self._missing and self._waited_s >= _LOOK_S

    @property
    def late(self) -> Sequence[int]:
        """Return the ranks whose report is late."""
        return sorted(self._missing) if self._waited_s > self._silent_s else ()

    def sent(self) -> None:
        self._missing, self._waited_s = set(self._ranks), 0.0

    def reported(self, rank: int) -> None:
        self._missing.discard(rank)


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank as of its last report.

    Attributes:
        memory_bytes: resident memory of its process.
        steps_behind: number of steps that rank 0 had begun and this rank had not finished.
    """

    memory_bytes: int
    steps_behind: int


@dataclass(frozen=True, slots=True, eq=False)
class RankProcess:
    """A follower, or the relay to a follower on another host.

    Attributes:
        pidfd: pidfd of the process. Owned by the process that started it, like the socket.
        is_fork: whether the follower is one of several forks of `process`. The pidfd is then its
            own.
    """

    process: "subprocess.Popen[bytes]"
    socket: socket.socket
    pidfd: int
    is_fork: bool = False

    def exit_code(self) -> int | None:
        """Return the exit code of an ended follower. None: other forks still run."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_FORKS_END_S if self.is_fork else _CLOSE_S)
        return self.process.returncode

    def close(self, deadline: float) -> None:
        """Wait for the end of the process, whose socket was closed before. Kill it at the
        deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        os.close(self.pidfd)


class Followers:
    """All followers, as rank 0 sees them. Engine thread only, except for `ask`.

    Attributes:
        parallel: the configuration, with the chosen collectives instead of auto.
        ranks: the collectives of rank 0.
        free_bytes: free memory of the follower with the least. Set by `loaded`.
        pids: process ids by rank from 1 on, each on its own host. Set by `loaded`.
        steps_sent: number of steps that rank 0 has begun. Any thread may read it.
        steps_done: number of steps that rank 0 has finished. Any thread may read it.
    """

    def __init__(self, config: EngineConfig, program: str, relay: Sequence[str] = ()) -> None:
        """Start the followers, which then load their parts of the model. Waits for other hosts.

        Must be called on the main thread, because the followers end with the calling thread.

        Args:
            program: module that a follower runs.
            relay: module of the relay to other hosts, and its arguments after the sockets.
        Raises:
            ConfigError: the configuration is impossible on these hosts.
        """
        self.steps_sent = self.steps_done = self.free_bytes = 0
        self._states: dict[int, RankState] = {}  # followers that have reported
        self._silent_s = config.parallel.collective_s + _PATIENCE_S
        self.parallel = parallel = config.parallel
        settings = config.model_dump_json().encode()
        self._followers: list[RankProcess] = []
        self._addressed: Sequence[RankProcess] = ()  # the receivers of messages
        self.pids: tuple[int, ...] = ()
        self._directory = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._closed, self._end = os.pipe()
        self._watcher: threading.Thread | None = None
        self._jobs: dict[int, PendingJob] = {}
        self._numbers = itertools.count()
        self._sockets: list[socket.socket] = []
        self._queue = JobQueue(self._sockets, self.send)
        try:
            self._followers += start_ranks(program, parallel.ranks_per_host - 1)
            if parallel.hosts > 1:
                num_others = parallel.num_ranks - parallel.ranks_per_host
                self._followers += start_ranks(relay[0], num_others, *relay[1:])
            if parallel.ranks_per_host > 2:
                self._know_forks(parallel.ranks_per_host - 1)
            self._addressed = self._followers[: parallel.ranks_per_host]
            self._sockets += [each.socket for each in self._addressed]
            self.ranks = self._met(parallel, settings)
        except BaseException:
            self.close()
            raise

    def _know_forks(self, count: int) -> None:
        """Wait until the first followers have been forked, and record their own pidfds."""
        for rank, follower in enumerate(self._followers[:count], start=1):
            packet, files = self._received(rank, 1)
            if packet != HELLO or len(files) != 1:
                raise EngineFault(f"rank {rank} has not begun as a fork")
            os.close(follower.pidfd)
            self._followers[rank - 1] = replace(follower, pidfd=files[0], is_fork=True)

    def _met(self, config: ParallelConfig, settings: bytes) -> RankGroups:
        """Make all followers open their collectives, and open those of rank 0."""
        if config.hosts > 1:
            return self._met_on_hosts(config, settings)
        directory = Path(self._directory.name)
        pidfds = [os.pidfd_open(os.getpid()), *(each.pidfd for each in self._followers)]
        try:
            with group_memories(config) as memories:
                for rank, follower in enumerate(self._followers, start=1):
                    others = [pidfd for other, pidfd in enumerate(pidfds) if other != rank]
                    start = StartRank(rank, settings, str(directory), *logs.in_use())
                    _send(follower, start, [*memories(rank), *others])
                own = [os.dup(file) for file in (*memories(0), *pidfds[1:])]
        finally:
            os.close(pidfds[0])
        return open_groups(config, 0, own, LoopbackMeeting(directory))

    def _met_on_hosts(self, config: ParallelConfig, settings: bytes) -> RankGroups:
        """Do the same once all hosts are connected, because collectives have a short timeout."""
        meeting, store = NetworkMeeting.leading(config)
        here = range(1, config.ranks_per_host)
        elsewhere = range(config.ranks_per_host, config.num_ranks)
        for addressed, ranks in ((elsewhere[:1], elsewhere), (here, here)):
            for rank in addressed:
                start = StartRank(rank, settings, store, *logs.in_use())
                _send(self._followers[rank - 1], start, [])
            self._await(RankStarted, ranks)
        return open_groups(config, 0, [], meeting)

    @property
    def share(self) -> Share:
        """The share of rank 0 in the model."""
        return self.ranks.share

    def loaded(self) -> Sequence[RankLoaded]:
        """Wait until all followers have loaded their parts. Return their replies by rank from 1 on.

        Raises:
            ConfigError: a follower cannot load. The error has its sentence.
        """
        replies = self._await(RankLoaded)
        self.free_bytes = min(each.free_bytes for each in replies)
        self.pids = tuple(each.pid for each in replies)
        return replies

    def measure(self, free_bytes: int) -> None:
        """Make all followers measure the memory of steps, see MeasureRank."""
        for follower in self._addressed:
            _send(follower, MeasureRank(free_bytes), ())

    def measured(self) -> int:
        """Wait for the results of `measure`. Return the memory for pages of the follower with the
        least.

        Raises:
            ConfigError: see `loaded`.
        """
        return min(each.free_bytes for each in self._await(RankMeasured))

    def start(self, make: Callable[[int], StartSteps], num_bytes: int) -> StepRing:
        """Wait until all followers are ready for steps, and return the blocks of steps.

        Args:
            make: returns the message, given the size of a block.
            num_bytes: size of the largest step.
        Raises:
            ConfigError: see `loaded`.
        """
        block_bytes = whole_pages(num_bytes)
        memory = ring_memory(block_bytes)
        try:
            for follower in self._addressed:
                _send(follower, make(block_bytes), [memory])
            ring = StepRing(memory, block_bytes)
        finally:
            os.close(memory)
        self._await(RankReady)
        return ring

    def send(self, header: bytes) -> None:
        """Send the header of a step to all followers. Never blocks.

        Raises:
            EngineFault: a follower does not read, or has ended.
        """
        for rank, follower in enumerate(self._addressed, start=1):
            try:
                follower.socket.send(header, socket.MSG_DONTWAIT)
            except OSError as error:
                raise EngineFault(f"rank {rank} takes no steps: {error}") from error

    def sample_now(self) -> None:
        """Make the first of two pipeline stages sample the newest step, see SampleStep."""
        self.send(_encoder.encode(SampleStep()))

    def ask(
        self,
        job: Job,
        on_done: "Callable[[Future[Sequence[bytes]]], None] | None" = None,
    ) -> "Future[Sequence[bytes]]":
        """Make all followers do a job. Any thread. Requires `watch`.

        Args:
            on_done: called with the future by the thread that receives the replies. Unlike a
                callback that is added later, it never runs inside this call. If it raises, the node
                ends.
        Returns:
            A future of the results of all followers, or of JobFailed. Another thread completes it.
        """
        number, pending = next(self._numbers), PendingJob(len(self._followers), on_done)
        self._jobs[number] = pending
        self._queue.put(_encoder.encode(RankJob(number, job)))
        return pending.future

    def states(self) -> Mapping[int, RankState]:
        """Return the states of rank 0 and of all followers that have reported, by rank."""
        return {0: self._state(self.steps_done, resident_bytes()), **self._states}

    def _state(self, steps_done: int, memory_bytes: int) -> RankState:
        # A follower may have finished a step that rank 0 has sent and not counted yet.
        return RankState(memory_bytes, max(0, self.steps_sent - steps_done))

    def watch(self, on_end: Callable[[], None]) -> None:
        """Make another thread receive the replies to jobs and the reports of followers. It calls
        `on_end` if a follower ends or freezes before `close`."""
        self._watcher = threading.Thread(target=self._watch, args=(on_end,), name="ranks")
        self._watcher.daemon = True
        self._watcher.start()

    def close(self, *, in_order: bool = False) -> None:
        """End the followers, and wait until they have ended.

        Args:
            in_order: True: the node has not failed. Other hosts are informed.
        """
        os.close(self._end)
        if self._watcher is not None:
            self._watcher.join()
        os.close(self._closed)
        self._queue.close()
        if in_order:
            with contextlib.suppress(EngineFault):  # a follower has failed in the meantime
                self.send(_encoder.encode(EndRanks()))
        for follower in self._followers:
            with contextlib.suppress(OSError):  # the follower has closed its end
                # Closing a socket with unread replies would cause an error there, and EndRanks
                # would be lost.
                follower.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSE_S
        for follower in self._followers:
            follower.close(deadline)
        self._directory.cleanup()

    def _await(self, expected: type[_Reply], ranks: range | None = None) -> Sequence[_Reply]:
        """Wait for the replies of some followers. None: of all followers."""
        replies = []
        for rank in range(1, 1 + len(self._followers)) if ranks is None else ranks:
            packet, _ = self._received(rank)
            match _from_follower.decode(packet):
                case RankFailed(error=error, config=True):
                    raise ConfigError(error)
                case RankFailed(error=error):
                    raise EngineFault(f"rank {rank}: {error}")
                case message if isinstance(message, expected):
                    replies.append(message)
                case message:
                    raise EngineFault(f"rank {rank} sent {type(message).__name__}")
        return replies

    def _received(self, rank: int, num_files: int = 0) -> tuple[bytes, Sequence[int]]:
        """Wait for a packet of a starting follower. Return the packet and its descriptors."""
        follower = self._followers[rank - 1]
        ready, _ = poll_ready([follower.socket], seconds=_LOAD_S)
        if not ready:
            raise EngineFault(f"rank {rank} has not started within {_LOAD_S:.0f} s")
        packet, files = _receive(follower.socket, num_files)
        if not packet:
            raise EngineFault(f"rank {rank} ended with code {follower.exit_code()}")
        return packet, files

    def _watch(self, on_end: Callable[[], None]) -> None:
        try:
            if self._take_replies():
                return
        except Exception:
            log.exception("the work of other ranks failed, and this node ends")
        on_end()

    def _take_replies(self) -> bool:
        """Receive replies until `close`, or until a follower ends or freezes. Return True after
        `close`."""
        pidfds = {each.pidfd: rank for rank, each in enumerate(self._followers, start=1)}
        sockets = {each.socket: rank for rank, each in enumerate(self._followers, start=1)}
        ping = PingTimer(sockets.values(), self._silent_s)
        sources = PollSet[Any]([*sockets, *pidfds, self._queue.waiting, self._closed])
        while True:
            ready, _ = sources.wait(self._queue.full, seconds=_LOOK_S)
            ended = {rank for pidfd, rank in pidfds.items() if pidfd in ready}
            for each in sockets.keys() & set(ready):
                if not self._take_reply(each, sockets[each], ping):
                    ended.add(sockets[each])
            if self._closed in ready:
                return True
            if ended:
                self._report_end(sorted(ended))
                return False
            ping.look(time.monotonic())
            if ping.late:
                late = ", ".join(map(str, ping.late))
                log.error(
                    "ranks do not reply, and this node ends %s",
                    kv(ranks=late, seconds=self._silent_s),
                )
                return False
            try:
                self._queue.flush()
                if ping.is_due:
                    ping.sent()
                    self._queue.put(_encoder.encode(Ping()))
            except EngineFault as error:
                log.error("a rank has ended, and so does this node %s", kv(reason=error))
                return False

    def _take_reply(self, source: socket.socket, rank: int, ping: PingTimer) -> bool:
        """Receive from one follower. Return False if it has closed its end."""
        packet, _ = _receive(source)
        match _from_follower.decode(packet) if packet else None:
            case JobDone(number=number) as reply:
                job = self._jobs.get(number)
                if job is None or not job.awaits(rank):
                    log.warning("a rank replied to no job %s", kv(rank=rank, job=number))
                elif job.take(rank, reply):
                    del self._jobs[number]
            case RankReport(steps=steps, memory_bytes=memory_bytes):
                ping.reported(rank)
                self._states[rank] = self._state(steps, memory_bytes)
        return bool(packet)

    def _report_end(self, ranks: Sequence[int]) -> None:
        """Report followers that have ended. The first one is the cause."""
        named, code = ", ".join(map(str, ranks)), self._followers[ranks[0] - 1].exit_code()
        log.error("a rank has ended, and so does this node %s", kv(ranks=named, exit_code=code))


def start_ranks(program: str, count: int, *arguments: str) -> list[RankProcess]:
    """Start one process with several sockets, which ends with the calling thread. Return one entry
    per socket.

    Several followers are forks of the process. They have its pidfd until each sends its own, in a
    packet HELLO.

    Args:
        program: module that the process runs.
        arguments: arguments after the descriptors of the sockets.
    """
    if not count:
        return []
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    ends = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-m", program, ",".join(map(str, ends)), *arguments]
    try:
        process = subprocess.Popen(
            leashed(command, signal.SIGKILL), stdin=subprocess.DEVNULL, pass_fds=ends
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [RankProcess(process, ours, os.pidfd_open(process.pid)) for ours, _ in pairs]


def _receive(sock: socket.socket, num_files: int = 0) -> tuple[bytes, Sequence[int]]:
    """Receive a packet and its descriptors. b"": the follower has closed its end."""
    while True:
        # A reset comes first if it has ended with an unread packet. Its own packets follow.
        with contextlib.suppress(ConnectionResetError):
            packet, files, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, num_files)
            return packet, files


def _send(follower: RankProcess, message: ToFollower, files: Sequence[int]) -> None:
    try:
        socket.send_fds(follower.socket, [_encoder.encode(message)], files)
    except OSError:
        log.warning("a rank ended before it was asked to start")  # `loaded` reports it
