"""Child processes that end with their parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from common.process.leash import leashed


class ChildProcess:
    """A child process and its log. It gets SIGTERM when its parent is killed.

    It has its own session. A terminal's Ctrl-C therefore reaches it only through `send`, and a
    kernel that divides cores by session (autogroup) does not delay it behind a node that uses all
    of them.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None,
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        descriptors: Sequence[int] = (),
        replaces_log: bool = True,
    ) -> None:
        """Start `command`.

        Args:
            log: file for its output. None: it shares this process's output.
            environment: None: the environment of this process.
            descriptors: descriptors of this process to inherit under the same numbers.
            replaces_log: truncate the log first instead of appending to it.
        """
        self.name = name
        self.log = log
        with contextlib.ExitStack() as files:
            output = None
            if log is not None:
                output = files.enter_context(_opened(log, replaces=replaces_log))
            self._process = subprocess.Popen(
                leashed(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=directory,
                pass_fds=descriptors,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, or minus the signal that killed it. None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing once the child has ended."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the child to end, on any event loop. Returns the exit code."""
        if self._process.poll() is None:
            await _readable(os.pidfd_open(self.pid))
        return self._process.wait()

    async def stop(self, patience_s: float) -> bool:
        """Send SIGTERM, then SIGKILL after `patience_s` seconds. Returns True if it exited 0."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                return await self.ended() == 0
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.ended()
            return False

    def last_lines(self, count: int = 20) -> str:
        """Return the last lines of its log, or "" if it has none."""
        if self.log is None:
            return ""
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=count)).rstrip()


def _opened(log: Path, *, replaces: bool) -> BinaryIO:
    """Open a log for this user only: it may contain prompts, addresses and names of keys."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replaces else os.O_APPEND)
    file = os.fdopen(os.open(log, flags, 0o600), "ab")
    os.fchmod(file.fileno(), 0o600)  # a log of an older version may be readable by others
    return file


async def _readable(descriptor: int) -> None:
    """Wait until the descriptor is readable, then close it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
