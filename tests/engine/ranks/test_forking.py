"""Followers as forks of one process: each is watched by its pidfd, and all end together."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.ranks import forking

WAIT_S = 60.0
# Each fork follows its socket: it ends with the code of a packet, or with 0 at the end of file.
PROGRAM = """
import os, runpy, socket, sys

forked = runpy.run_path(sys.argv[2])["forked"]  # the package imports torch
own = forked([int(each) for each in sys.argv[1].split(",")])
packet = socket.socket(fileno=own).recv(16)
os._exit(int(packet or b"0"))
"""


class Forks:
    """Two forks and their parent process."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        theirs = [end.fileno() for _, end in pairs]
        ends = ",".join(map(str, theirs))
        command = [sys.executable, "-c", PROGRAM, ends, forking.__file__]
        self.process = subprocess.Popen(command, pass_fds=theirs)
        self.sockets = [ours for ours, _ in pairs]
        for _, end in pairs:
            end.close()
        self.pidfds = []
        for ours in self.sockets:
            ours.settimeout(WAIT_S)
            packet, (pidfd,), _, _ = socket.recv_fds(ours, 16, 1)
            assert packet == forking.HELLO
            self.pidfds.append(pidfd)

    def await_end(self, number: int) -> None:
        ready, _, _ = select.select([self.pidfds[number]], [], [], WAIT_S)
        assert ready

    def runs(self, number: int) -> bool:
        return not select.select([self.pidfds[number]], [], [], 0)[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for ours in self.sockets:
            ours.close()
        for pidfd in self.pidfds:
            os.close(pidfd)


@pytest.fixture
def forks() -> Iterator[Forks]:
    with contextlib.closing(Forks()) as made:
        yield made


def test_forks_end_with_0_at_the_end_of_their_sockets(forks: Forks) -> None:
    forks.sockets[0].close()
    forks.await_end(0)
    assert forks.runs(1)
    forks.sockets[1].close()
    assert forks.process.wait(WAIT_S) == 0


# Seen failing if all forks end at the first exit: the error of another one is lost.
def test_a_fork_that_exits_leaves_the_others_time_to_report_errors(forks: Forks) -> None:
    forks.sockets[1].send(b"2")
    forks.await_end(1)
    assert forks.runs(0)
    forks.sockets[0].send(b"3")
    assert forks.process.wait(WAIT_S) in (2, 3)


@pytest.mark.parametrize("victim", ["fork", "parent"])
def test_no_fork_outlives_a_killed_one_or_their_parent(forks: Forks, victim: str) -> None:
    """Seen failing without the signal at the end of the parent."""
    if victim == "fork":
        signal.pidfd_send_signal(forks.pidfds[0], signal.SIGKILL)
    else:
        forks.process.kill()
    for number in range(2):
        forks.await_end(number)
    assert forks.process.wait(WAIT_S) == -signal.SIGKILL
