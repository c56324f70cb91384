"""Runs work on untrusted input in a helper process, with kernel limits of memory and time.

The helper has everything loaded and forks a process for each question. A question that crashes,
hangs or exceeds its limits ends only its own process. `Helper` is the caller's side, `serve` the
helper's.
"""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.process.leash import follow_parent, leashed

_OUT_OF_TIME = frozenset({-signal.SIGXCPU, -signal.SIGKILL})
ANSWERED = 0
NO_MEMORY = 1
CRASHED = 2


class Question(msgspec.Struct, frozen=True):
    """A piece of work and its limits.

    Attributes:
        max_bytes: limit of memory in addition to the helper's own.
    """

    content: bytes
    cpu_s: int
    max_bytes: int


class Answer(msgspec.Struct, frozen=True):
    """The result of a question.

    Attributes:
        code: exit code of the question's process, or minus the signal that ended it.
    """

    code: int
    content: bytes = b""

    @property
    def took_too_long(self) -> bool:
        return self.code in _OUT_OF_TIME


class HelperLost(Exception):
    """The helper has ended or exceeded its deadline. The next question starts a new one."""


class Helper:
    """A helper process, started with the first question.

    Each lane carries one question at a time, independent of the other lanes. The thread that asks
    first must live as long as the helper is needed, because the kernel kills the helper when that
    thread ends.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        num_lanes: int,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            module: module to run, with `arguments` and a descriptor for each lane.
            num_lanes: number of concurrent questions.
            deadline_s: wall-clock limit of a question, including a start of the helper.
            environment: variables added to those of this process.
        """
        self._command = [sys.executable, "-m", module, *arguments]
        self._num_lanes = num_lanes
        self._deadline_s = deadline_s
        self._environment = environment or {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lanes: Sequence[Connection] = ()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while the helper does not run."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def ask(self, lane: int, question: Question) -> Answer:
        """Return the answer to a question. Raises HelperLost."""
        connection = self._connection(lane)
        try:
            connection.send_bytes(msgspec.msgpack.encode(question))
            return msgspec.msgpack.decode(connection.recv_bytes(), type=Answer)
        except (OSError, EOFError) as error:
            self._give_up(connection)
            raise HelperLost from error

    def close(self) -> None:
        """End the helper. Current and later questions raise HelperLost."""
        with self._lock:
            self._closed = True
            self._end()

    def _connection(self, lane: int) -> Connection:
        with self._lock:
            if self._closed:
                raise HelperLost
            if self._process is None:
                self._start()
            return self._lanes[lane]

    def _give_up(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._lanes:
                self._end()

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self._num_lanes)]
        theirs = [other.fileno() for _, other in pairs]
        try:
            self._process = subprocess.Popen(
                leashed([*self._command, *map(str, theirs)], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # not affected by a terminal's Ctrl-C
                pass_fds=theirs,
                env={**os.environ, **self._environment},
            )
        except OSError as error:
            for mine, _ in pairs:
                mine.close()
            raise HelperLost from error
        finally:
            for _, other in pairs:
                other.close()
        for mine, _ in pairs:
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                mine.setsockopt(socket.SOL_SOCKET, way, _timeval(self._deadline_s))
        self._lanes = [Connection(mine.detach()) for mine, _ in pairs]

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # threads that wait for answers see the end of their connection
            self._process.wait()
            self._process = None
        self._lanes = ()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


_NICENESS = 10  # lower CPU priority than serving processes
_STATM = Path("/proc/self/statm")
Work = Callable[[bytes], bytes]


class _Running(NamedTuple):
    """The process of one question, and the file with its result."""

    pid: int
    result: int
    asker: Connection


def serve(descriptors: Sequence[str], work: Work) -> None:
    """Answer questions until the other end of the descriptors closes.

    Args:
        descriptors: one for each lane.
        work: returns the answer to a question's content. Raises MemoryError if memory is short.
    """
    os.nice(_NICENESS)
    askers = [Connection(int(each)) for each in descriptors]
    running: dict[int, _Running] = {}  # by descriptor of the process
    while True:
        for ready in wait([*askers, *running]):
            if isinstance(ready, int):
                _report(running.pop(ready))
                os.close(ready)
                continue
            assert isinstance(ready, Connection)
            try:
                question = msgspec.msgpack.decode(ready.recv_bytes(), type=Question)
            except (EOFError, OSError):
                return
            begun = _begin(question, ready, work)
            running[os.pidfd_open(begun.pid)] = begun


def _begin(question: Question, asker: Connection, work: Work) -> _Running:
    result = os.memfd_create("answer")
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        try:
            follow_parent(parent, signal.SIGKILL)  # a fork does not inherit this setting
            code = _answer(question, work, result)
        finally:
            os._exit(code)
    return _Running(pid, result, asker)


def _report(ended: _Running) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1])
    try:
        content = b""
        if code == ANSWERED:
            content = os.pread(ended.result, os.fstat(ended.result).st_size, 0)
    finally:
        os.close(ended.result)
    ended.asker.send_bytes(msgspec.msgpack.encode(Answer(code, content)))


def _answer(question: Question, work: Work, result: int) -> int:
    """Answer a question in the forked process. Returns the process's exit code."""
    most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + question.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (question.cpu_s, question.cpu_s))
    try:
        left = memoryview(work(question.content))
    except MemoryError:
        return NO_MEMORY
    while left:
        left = left[os.write(result, left) :]
    return ANSWERED
