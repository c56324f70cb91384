"""The followers of a host as forks of one process, which has imported the engine for all of them.

Imports take most of the time in which a rank of a small model starts.
"""

import gc
import os
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

from common.process.leash import follow_parent

HELLO = b"forked"  # the packet with a follower's pidfd


def forked(descriptors: Sequence[int]) -> int:
    """Fork a process for each descriptor of a socket, and return in these processes alone.

    This process must have one thread. It ends when all of them have ended, or at once if one is
    killed by a signal. Then the others are killed, too.

    Returns:
        The descriptor of the new process, which has sent its pidfd over it.
    """
    gc.collect()
    gc.freeze()  # a collection would copy the memory that the processes share
    parent = os.getpid()
    for number, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            follow_parent(parent, signal.SIGKILL)
            for other in descriptors[number + 1 :]:
                os.close(other)
            _send_pidfd(descriptor)
            return descriptor
        os.close(descriptor)
    _wait(len(descriptors))


def _send_pidfd(descriptor: int) -> None:
    pidfd = os.pidfd_open(os.getpid())
    with socket.socket(fileno=os.dup(descriptor)) as leader:
        socket.send_fds(leader, [HELLO], [pidfd])
    os.close(pidfd)


def _wait(count: int) -> NoReturn:
    """End with the exit code of a process that failed. Processes that end at once have no order."""
    failed = 0
    for _ in range(count):
        _, status = os.wait()
        if os.WIFSIGNALED(status):  # the others may still report their own errors after an exit
            os.kill(os.getpid(), signal.SIGKILL)
        failed = failed or os.WEXITSTATUS(status)
    os._exit(failed)
