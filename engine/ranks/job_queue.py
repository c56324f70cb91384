"""Jobs of all followers: those that wait to be sent, and those that wait for replies."""

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from common.errors import EngineFault
from common.process.polling import poll_ready
from engine.ranks.messages import JobDone


class JobFailed(EngineFault):
    """A follower failed to do a job."""


class PendingJob:
    """A job whose replies are still missing."""

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
        """Record the reply of a rank. Return whether it was the last one."""
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


class JobQueue:
    """Jobs that wait to be sent to all followers. Any thread.

    Jobs share the sockets with steps, and sending a step must never block. While a follower is busy
    and its socket is more than a quarter full, jobs therefore wait here.

    Args:
        send: sends a packet to all followers.
    Attributes:
        waiting: descriptor that is readable once a job waits. `flush` reads it.
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
        """Return the sockets for which jobs wait."""
        return self._full() if self._packets else ()

    def flush(self) -> None:
        """Send the jobs that no longer need to wait."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.waiting)
            self._send_some()

    def close(self) -> None:
        """Reject later jobs with the error of an ended rank."""
        self._sockets = ()
        os.close(self.waiting)

    def _send_some(self) -> None:
        while self._packets and not self._full():
            self._send(self._packets.popleft())

    def _full(self) -> Sequence[socket.socket]:
        _, writable = poll_ready([], self._sockets, seconds=0.0)
        return [each for each in self._sockets if each not in writable]
