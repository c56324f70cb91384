"""Forks the followers of a host from one process that has imported the engine for all of them.

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
    """Fork one process per socket descriptor. Return only in these processes.

    The calling process must have a single thread. It ends when all forks have ended. If a fork is
    killed by a signal, it kills the others and ends at once.

    Returns:
        The descriptor of the fork, which has sent its pidfd over it.
    """
    gc.collect()
    gc.freeze()  # a garbage collection would copy the shared memory
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
    """Exit with the exit code of a failed fork."""
    failed = 0
    for _ in range(count):
        _, status = os.wait()
        # After an ordinary exit, the others may still report their own errors.
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), signal.SIGKILL)
        failed = failed or os.WEXITSTATUS(status)
    os._exit(failed)
