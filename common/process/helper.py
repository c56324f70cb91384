"""Processing of untrusted input in a helper process, with kernel limits of memory and time.

The helper keeps running and forks a process for each question. A question that crashes, hangs or
exceeds its limits ends only that process. `helper_program.py` is the other end.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import msgspec

from common.process.leash import leashed

_OUT_OF_TIME = frozenset({-signal.SIGXCPU, -signal.SIGKILL})
ANSWERED = 0
NO_MEMORY = 1
CRASHED = 2


class Question(msgspec.Struct, frozen=True):
    """A piece of work and its limits.

    Attributes:
        content: input.
        cpu_s: CPU seconds.
        max_bytes: memory in addition to that of the helper itself.
    """

    content: bytes
    cpu_s: int
    max_bytes: int


class Answer(msgspec.Struct, frozen=True):
    """The result of a question.

    Attributes:
        code: exit code of the question's process, or minus the signal that ended it.
        content: output.
    """

    code: int
    content: bytes = b""

    @property
    def took_too_long(self) -> bool:
        return self.code in _OUT_OF_TIME


class HelperLost(Exception):
    """The helper has ended or has exceeded its deadline. The next question starts a new one."""


class Helper:
    """A helper process, started with the first question.

    Each lane is used by one thread at a time, and lanes do not wait for each other. The thread that
    asks first must live as long as the helper is needed: the kernel kills the helper when that
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
        """Configure the helper.

        Args:
            module: of the program, run with `arguments` and a descriptor for each lane.
            arguments: for the program.
            num_lanes: number of concurrent questions.
            deadline_s: wall-clock limit of a question, including a start of the program.
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
            self._process.kill()  # threads that read a connection see its end
            self._process.wait()
            self._process = None
        self._lanes = ()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))
