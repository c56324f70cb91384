"""Waits for descriptors with any number."""

import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from common.process.polling import poll_ready

WAIT_S = 60.0
ABOVE = 1100  # more than select(2) takes


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < ABOVE + 2:
        pytest.skip(f"this user has {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, ABOVE + 2), hard))
    with contextlib.ExitStack() as open_until_done:
        open_until_done.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        ends = []
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            moved = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, ABOVE)
            end.close()
            ends.append(open_until_done.enter_context(socket.socket(fileno=moved)))
        yield ends[0], ends[1]


# Seen failing with select.select: "filedescriptor out of range in select()".
def test_descriptors_above_1023_become_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert ours.fileno() >= ABOVE
    assert poll_ready([ours], seconds=0.0) == ([], [])
    assert poll_ready([ours], [ours], seconds=WAIT_S) == ([], [ours])
    theirs.send(b"packet")
    assert poll_ready([ours], [ours], seconds=WAIT_S) == ([ours], [ours])


def test_sources_are_sockets_and_numbers(pair: tuple[socket.socket, socket.socket]) -> None:
    number = os.eventfd(1, os.EFD_CLOEXEC)
    try:
        assert poll_ready([number, pair[0]], seconds=WAIT_S) == ([number], [])
    finally:
        os.close(number)


def test_an_ended_source_is_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    readable, _ = poll_ready([ours], seconds=WAIT_S)
    assert readable == [ours] and ours.recv(1) == b""
