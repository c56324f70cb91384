"""The front's view of the engine process: started by exec, watched, and never left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

from common.process.ipc import socket_pair
from common.process.leash import leashed

# A step has hundreds of parallel regions, and waking a thread for each costs a fifth of it. So
# threads spin for about a tenth of a millisecond, then sleep. OpenMP reads this where torch is
# loaded. It would override a policy that the user has chosen.
_OPENMP = {"GOMP_SPINCOUNT": "20000"}
_POLICY = "OMP_WAIT_POLICY"


class EngineProcess:
    """A running `python -m MODULE` and the front's ends of its sockets.

    Attributes:
        transfer_socket: to the transfer thread of the role that begins next. Owned by the code that
            opens it.

    Made on the event loop, on the front's main thread: the engine dies with the thread that made
    it.
    """

    def __init__(self, module: str) -> None:
        self.engine_socket, engine_end = socket_pair()
        # Each message carries one socket.
        self._hand_over, handed_over = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends = (engine_end.fileno(), handed_over.fileno())
        # End of file ends an engine that reads. The leash ends one that is importing or stuck.
        command = [sys.executable, "-m", module, *map(str, ends)]
        # Until the engine ignores them, Ctrl-C and SIGTERM to the group would kill it. A blocked
        # signal stays blocked over exec, and is delivered here when it is unblocked.
        meant_for_us = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, meant_for_us)
        try:
            self._process = subprocess.Popen(
                leashed(command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                env={**({} if _POLICY in os.environ else _OPENMP), **os.environ},
                pass_fds=ends,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            engine_end.close()
            handed_over.close()
        self.renew_transfer_socket()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._notice_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def renew_transfer_socket(self) -> None:
        """Make a new transfer socket for the role whose Start is sent after this."""
        self.transfer_socket, theirs = socket_pair()
        with theirs, contextlib.suppress(OSError):  # an engine's end is reported elsewhere
            socket.send_fds(self._hand_over, [b"s"], [theirs.fileno()])

    async def ended(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end and return the exit code, negative for a signal. Returns None if the
        process still runs after `timeout_s`.
        """
        try:
            # Not wait_for: in Python 3.11 it can swallow a cancel that comes with the event.
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        return self._process.wait()

    async def end(self, grace_s: float) -> int:
        """Kill the process if it does not end within `grace_s`. Returns the exit code."""
        code = await self.ended(grace_s)
        if code is None:
            self._process.kill()
            code = await self.ended()
        assert code is not None
        return code

    def _notice_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._ended.set()

    def close(self) -> None:
        """Kill the process if it still runs. Idempotent, for every way out of the front."""
        if self._pidfd < 0:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.engine_socket.close()
        self._hand_over.close()


def exit_sentence(code: int) -> str:
    """Return "was killed by SIGKILL" or "ended with exit code 1"."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
