"""Whether a guide can be compiled with little enough, asked of a process beside this one."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from common.errors import InvalidRequest, Overloaded
from common.process.leash import leashed
from common.requests.guide import Guide

MAX_BYTES = 2 << 30  # that one guide may take, beside what is there already
_DEADLINE_S = 300.0  # of a trial on a machine that is busy with other things, or of the first start
_OUT_OF_TIME = frozenset({-signal.SIGXCPU, -signal.SIGKILL})


class Lane(Enum):
    """Short trials do not wait for long ones. Its value: seconds of a core."""

    QUICK = 1
    SLOW = 60


class Trial(msgspec.Struct, frozen=True):
    """What is asked: a guide, and the seconds of a core that it may take."""

    guide: Guide
    cpu_s: int


class TooSlow(Exception):
    """It has used up its time."""


class Prover(Protocol):
    """Asked by one thread for each lane."""

    def prove(self, guide: Guide, lane: Lane) -> None:
        """Returns if its compilation ends.

        Raises:
            TooSlow: not in the time of that lane.
            InvalidRequest: it takes more memory than a guide may, or breaks the compiler.
            Overloaded: nobody could find out.
        """
        ...

    def close(self) -> None: ...


class Beside:
    """A Prover: asks `trials.py`, which it starts with the first guide, and anew when that has
    died."""

    def __init__(self, directory: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        eos = ",".join(str(token) for token in eos_token_ids)
        self._arguments = [str(directory), str(vocabulary_size), eos]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lanes: dict[Lane, Connection] = {}

    def prove(self, guide: Guide, lane: Lane) -> None:
        asked = msgspec.msgpack.encode(Trial(guide, lane.value))
        connection = self._connection(lane)
        try:
            connection.send_bytes(asked)
            if not connection.poll(_DEADLINE_S):
                raise TimeoutError
            code = int(connection.recv_bytes())
        except (OSError, EOFError) as error:
            self._give_up(connection)
            raise Overloaded("the process that tries guides has died or stands still") from error
        if code in _OUT_OF_TIME:
            raise TooSlow(
                f"sampling.{guide.kind}: compiling it takes more than {lane.value} s of a core"
            )
        if code != 0:
            raise InvalidRequest(
                f"sampling.{guide.kind}: compiling it takes more than {MAX_BYTES >> 20} MiB"
            )

    def close(self) -> None:
        with self._lock:
            self._end()

    def _connection(self, lane: Lane) -> Connection:
        with self._lock:
            if self._process is None:
                self._start()
            return self._lanes[lane]

    def _give_up(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._lanes.values():
                self._end()

    def _start(self) -> None:
        pairs = {lane: socket.socketpair() for lane in Lane}
        theirs = [other.fileno() for _, other in pairs.values()]
        command = [sys.executable, "-m", "common.engine.features.trials", *self._arguments]
        self._process = subprocess.Popen(
            leashed([*command, *map(str, theirs)], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is not for it
            pass_fds=theirs,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for lane, (mine, other) in pairs.items():
            other.close()
            self._lanes[lane] = Connection(mine.detach())

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # whoever waits at a connection reads its end
            self._process.wait()
            self._process = None
        self._lanes.clear()
