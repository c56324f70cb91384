"""The followers of a node: processes that rank 0 starts, and that end with it.

    start: StartRank -> ... loads ... -> RankLoaded; StartSteps -> RankReady; then headers of steps

The followers on other hosts are behind one process, the relay. It has a socket for what each of
them sends. What is sent to the first of them goes to all.

Rank 0 is a node's engine process. If a follower ends, it ends too, and with it the node. Frozen
followers are found by the timeout of the next collective, and without steps by their missing reply
to a Ping. A follower that cannot load reports one sentence, which is rank 0's error.
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
from collections import deque
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

_LOAD_S = 3600.0  # for weights from a slow disk
_CLOSE_S = 3.0  # less than the frontend waits for the end of an engine before it kills it
_FORKS_END_S = 0.5  # from the end of one fork to that of all, if it was killed
_LOOK_S = 1.0  # between two looks for missing replies
_PATIENCE_S = 5.0  # longer than in a collective, whose error is the better one if a step runs

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_from_follower: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFollower)
_Reply = TypeVar("_Reply", RankStarted, RankLoaded, RankMeasured, RankReady)


class JobFailed(EngineFault):
    """A follower could not do a job."""


class _AskedJob:
    """A job whose replies are awaited."""

    def __init__(
        self, num_followers: int, on_done: "Callable[[Future[Sequence[bytes]]], None] | None"
    ) -> None:
        self._missing = set(range(1, 1 + num_followers))
        self._on_done = on_done
        self._results: list[bytes] = []
        self._error = ""
        self.future: Future[Sequence[bytes]] = Future()

    def awaits(self, rank: int) -> bool:
        return rank in self._missing

    def take(self, rank: int, reply: JobDone) -> bool:
        """Note the reply of a rank, and return whether it was the last one."""
        self._missing.remove(rank)
        self._results.append(reply.result)
        self._error = self._error or reply.error
        if self._missing:
            return False
        if self._error:
            self.future.set_exception(JobFailed(self._error))
        else:
            self.future.set_result(self._results)
        if self._on_done is not None:
            self._on_done(self.future)
        return True


class PingTimer:
    """When to send a Ping to all followers, and which of them are late with their report. If this
    process was stopped meanwhile, that time does not count, because they may have been stopped too.

    Args:
        ranks: of the followers.
        silent_s: longest time until a report.
    """

    def __init__(self, ranks: Collection[int], silent_s: float) -> None:
        self._ranks = frozenset(ranks)
        self._silent_s = silent_s
        self._missing: set[int] = set()
        self._waited_s = 0.0  # since the newest Ping
        self._looked = -2 * _LOOK_S  # so that the first Ping is due at the first look

    def look(self, now: float) -> None:
        """Note the time. Called at least once in a second."""
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
    """The state of a rank, as it last reported it.

    Attributes:
        memory_bytes: resident memory of its process.
        steps_behind: number of steps that rank 0 had begun and this rank was not done with.
    """

    memory_bytes: int
    steps_behind: int


@dataclass(frozen=True, slots=True, eq=False)
class RankProcess:
    """A follower, or the relay to one on another host.

    Attributes:
        pidfd: of the process. Owned by the process that started it, like the socket.
        is_fork: the follower is one of the forks of `process`, and the pidfd is its own.
    """

    process: "subprocess.Popen[bytes]"
    socket: socket.socket
    pidfd: int
    is_fork: bool = False

    def exit_code(self) -> int | None:
        """Return the exit code after the end of the follower. None: other forks still run."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_FORKS_END_S if self.is_fork else _CLOSE_S)
        return self.process.returncode

    def close(self, deadline: float) -> None:
        """Wait for the end of the process, which has seen the end of file of its socket. Kill it at
        the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        os.close(self.pidfd)


class Followers:
    """All ranks but rank 0, as rank 0 sees them. Engine thread only, except for `ask`.

    Attributes:
        parallel: the configuration, with collectives in place of auto.
        ranks: the collectives of rank 0.
        free_bytes: least memory that a follower has left. Set by `loaded`.
        steps_sent: number of steps that rank 0 has begun.
        steps_done: number of steps that rank 0 is done with. Any thread may read both.
    """

    def __init__(self, config: EngineConfig, program: str, relay: Sequence[str] = ()) -> None:
        """Start the followers, which load their parts of the model meanwhile. Made on the main
        thread: they end with the thread that makes them. Waits for other hosts.

        Args:
            program: module that a follower runs.
            relay: module of the relay to other hosts, and its arguments after the sockets.
        Raises:
            ConfigError: the configuration does not suit the hosts.
        """
        self.steps_sent = self.steps_done = self.free_bytes = 0
        self._states: dict[int, RankState] = {}  # of followers that have reported
        self._silent_s = config.parallel.collective_s + _PATIENCE_S
        self.parallel = parallel = config.parallel
        settings = config.model_dump_json().encode()
        self._followers: list[RankProcess] = []
        self._addressed: Sequence[RankProcess] = ()  # those that messages are sent to
        self._pids: tuple[int, ...] = ()
        self._directory = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._closed, self._end = os.pipe()
        self._watcher: threading.Thread | None = None
        self._jobs: dict[int, _AskedJob] = {}
        self._numbers = itertools.count()
        self._sockets: list[socket.socket] = []
        self._queue = JobQueue(self._sockets, self.send)
        try:
            self._followers += start_ranks(program, parallel.ranks_per_host - 1)
            if parallel.hosts > 1:
                num_others = parallel.num_ranks - parallel.ranks_per_host
                self._followers += _start_processes(relay[0], num_others, relay[1:])
            if parallel.ranks_per_host > 2:
                self._know_forks(parallel.ranks_per_host - 1)
            self._addressed = self._followers[: parallel.ranks_per_host]
            self._sockets += [each.socket for each in self._addressed]
            self.ranks = self._met(parallel, settings)
        except BaseException:
            self.close()
            raise

    def _know_forks(self, count: int) -> None:
        """Wait until the first followers have been forked, and know them by their own pidfds."""
        for rank, follower in enumerate(self._followers[:count], start=1):
            packet, files = self._received(rank, 1)
            if packet != HELLO or len(files) != 1:
                raise EngineFault(f"rank {rank} has not begun as a fork")
            os.close(follower.pidfd)
            self._followers[rank - 1] = replace(follower, pidfd=files[0], is_fork=True)

    def _met(self, config: ParallelConfig, settings: bytes) -> RankGroups:
        """Have all followers open their collectives, and open those of rank 0."""
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
        """Do it when all hosts are there, because collectives do not wait for long."""
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
        """The part of rank 0."""
        return self.ranks.share

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank from 1 on, each with its number on its own host. Set by
        `loaded`."""
        return self._pids

    def loaded(self) -> Sequence[RankLoaded]:
        """Wait until all followers have loaded their parts. Return their replies by rank from 1 on.

        Raises:
            ConfigError: one cannot. The error is its sentence.
        """
        replies = self._await(RankLoaded)
        self.free_bytes = min(each.free_bytes for each in replies)
        self._pids = tuple(each.pid for each in replies)
        return replies

    def measure(self, free_bytes: int) -> None:
        """Have all followers measure the memory of steps, see MeasureRank."""
        for follower in self._addressed:
            _send(follower, MeasureRank(free_bytes), ())

    def measured(self) -> int:
        """Wait until all followers have measured it. Return the least memory that one has left for
        pages.

        Raises:
            ConfigError: as `loaded`.
        """
        return min(each.free_bytes for each in self._await(RankMeasured))

    def start(self, make: Callable[[int], StartSteps], num_bytes: int) -> StepRing:
        """Wait until all followers are ready for steps, and return the blocks of steps.

        Args:
            make: returns the message, of a block's size.
            num_bytes: of the largest step.
        Raises:
            ConfigError: as `loaded`.
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
        """Have the first of two stages sample the newest step, see SampleStep."""
        self.send(_encoder.encode(SampleStep()))

    def ask(
        self,
        make: Callable[[int], Job],
        on_done: "Callable[[Future[Sequence[bytes]]], None] | None" = None,
    ) -> "Future[Sequence[bytes]]":
        """Have all followers do a job. Any thread. Requires `watch`.

        Args:
            make: returns the job, with its number.
            on_done: called with the future by the thread that takes the replies. Never within this
                call, unlike a callback that is added later. If it raises, the node ends.
        Returns:
            The results of all followers, completed by another thread. Or JobFailed.
        """
        number, asked = next(self._numbers), _AskedJob(len(self._followers), on_done)
        self._jobs[number] = asked
        self._queue.put(_encoder.encode(make(number)))
        return asked.future

    def states(self) -> Mapping[int, RankState]:
        """Return the states of rank 0 and of all followers that have reported, by rank."""
        return {0: self._state(self.steps_done, resident_bytes()), **self._states}

    def _state(self, steps_done: int, memory_bytes: int) -> RankState:
        # A follower may be done with a step that rank 0 has sent and not counted yet.
        return RankState(memory_bytes, max(0, self.steps_sent - steps_done))

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have another thread take the replies to jobs and the reports of followers, and call
        `on_end` when a follower ends or freezes before `close`."""
        self._watcher = threading.Thread(target=self._watch, args=(on_end,), name="ranks")
        self._watcher.daemon = True
        self._watcher.start()

    def close(self, *, in_order: bool = False) -> None:
        """End the followers, and wait until they have ended.

        Args:
            in_order: the node has not failed. Other hosts get to know.
        """
        os.close(self._end)
        if self._watcher is not None:
            self._watcher.join()
        os.close(self._closed)
        self._queue.close()
        if in_order:
            with contextlib.suppress(EngineFault):  # one has failed meanwhile
                self.send(_encoder.encode(EndRanks()))
        for follower in self._followers:
            with contextlib.suppress(OSError):  # it has closed its end
                # A closed socket with unread replies would be an error there, and lose EndRanks.
                follower.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSE_S
        for follower in self._followers:
            follower.close(deadline)
        self._directory.cleanup()

    def _await(self, expected: type[_Reply], ranks: range | None = None) -> Sequence[_Reply]:
        """Wait for the replies of some followers. None: of all."""
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
        """Wait for a packet of a starting follower. Return it and its files."""
        follower = self._followers[rank - 1]
        ready, _ = poll_ready([follower.socket], seconds=_LOAD_S)
        if not ready:
            raise EngineFault(f"rank {rank} has not started within {_LOAD_S:.0f} s")
        packet, files = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):  # it ended with a message unread
            packet, files, _, _ = socket.recv_fds(follower.socket, MAX_PACKET_BYTES, num_files)
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
        """Take replies until `close`, or until a follower ends or freezes. Return whether it was
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
        """Return whether the follower still has its end."""
        packet = b""
        with contextlib.suppress(ConnectionResetError):  # it was killed with a job unread
            packet = source.recv(MAX_PACKET_BYTES)
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
        """Report followers that have ended, because of the first of them."""
        named, code = ", ".join(map(str, ranks)), self._followers[ranks[0] - 1].exit_code()
        log.error("a rank has ended, and so does this node %s", kv(ranks=named, exit_code=code))


class JobQueue:
    """Jobs on their way to all followers. Any thread.

    Jobs share the sockets with steps, which must never wait. So jobs wait here while a socket is
    more than a quarter full, because a follower is busy.

    Args:
        send: sends a packet to all followers.
    Attributes:
        waiting: descriptor that is readable after a job has begun to wait. `flush` reads it.
    """

    def __init__(self, sockets: Sequence[socket.socket], send: Callable[[bytes], None]) -> None:
        self.waiting = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sockets = sockets
        self._send = send
        self._packets: deque[bytes] = deque()
        self._lock = threading.Lock()

    def put(self, packet: bytes) -> None:
        with self._lock:
            self._packets.append(packet)
            self._send_some()
            if self._packets:
                os.eventfd_write(self.waiting, 1)

    @property
    def full(self) -> Sequence[socket.socket]:
        """Return the sockets that jobs wait for."""
        return self._full() if self._packets else ()

    def flush(self) -> None:
        """Send the jobs that need not wait any more."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.waiting)
            self._send_some()

    def close(self) -> None:
        """A job that comes later is an error, as of a rank that has ended."""
        self._sockets = ()
        os.close(self.waiting)

    def _send_some(self) -> None:
        while self._packets and not self._full():
            self._send(self._packets.popleft())

    def _full(self) -> Sequence[socket.socket]:
        _, writable = poll_ready([], self._sockets, seconds=0.0)
        return [each for each in self._sockets if each not in writable]


def start_ranks(program: str, count: int, *arguments: str) -> list[RankProcess]:
    """Start followers, which end with the calling thread. Several are forks of one process, whose
    pidfd they have until each sends its own, in a packet HELLO.

    Args:
        program: module that a follower runs.
        arguments: after the descriptors of its sockets.
    """
    return _start_processes(program, count, arguments) if count else []


def _start_processes(program: str, num_sockets: int, more: Sequence[str]) -> list[RankProcess]:
    """Start one process with several sockets. Return one entry for each."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_sockets)]
    ends = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-m", program, ",".join(map(str, ends)), *more]
    try:
        process = subprocess.Popen(
            leashed(command, signal.SIGKILL), stdin=subprocess.DEVNULL, pass_fds=ends
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [RankProcess(process, ours, os.pidfd_open(process.pid)) for ours, _ in pairs]


def _send(follower: RankProcess, message: ToFollower, files: Sequence[int]) -> None:
    try:
        socket.send_fds(follower.socket, [_encoder.encode(message)], files)
    except OSError:
        log.warning("a rank ended before it was asked to start")  # `loaded` finds it
