"""Baton's processes, started by a test, watched by their output, and always ended."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.processes import fork_server
from tests.support.runner.isolation import ROOT as ROOT

WAIT_S = 180.0  # an engine's start takes seconds of a shared core


class Program:
    """`python -m MODULE ARGUMENTS` in its own process group. The caller closes it.

    The fork server starts routers, nodes and `baton up`, unless `forked` is False.
    """

    def __init__(self, module: str, *arguments: str, forked: bool = True) -> None:
        environment = {**os.environ}
        environment.pop("GRPC_VERBOSITY", None)
        read, write = os.pipe()
        self._output = open(read)  # noqa: SIM115
        with open(os.devnull, "rb") as nothing, open(write, "wb") as output:
            if forked and module in fork_server.PROGRAMS:
                files = (nothing.fileno(), write, write)
                self.process: Any = fork_server.start(
                    module, arguments, environment, Path.cwd(), files
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env=environment,
                    stdin=nothing,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def line_with(self, text: str, timeout_s: float = WAIT_S) -> str:
        """Return the first output line that contains `text`, as soon as it is written."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if text in line:
                        return line
                seen = len(self._lines)
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    raise AssertionError(f"no line with {text!r} in:\n{''.join(self._lines)}")
                self._changed.wait(left)

    def address(self) -> str:
        """Return the listening address from the process's log."""
        line = self.line_with("listening address=")
        return line.split("address=")[1].split()[0]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def exit_code(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the end and the last line. Returns the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(60.0)
        return code

    def close(self) -> None:
        """Kill the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(60.0)
        self._output.close()

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False
    return state != "Z"


def await_end(pid: int, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)
