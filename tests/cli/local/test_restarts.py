"""Failed processes are restarted after a delay, and the restarts are reported."""

import asyncio
import signal
import time
from contextlib import suppress

from cli.local.system import RestartTimes, keep_running
from common.process.children import ChildProcess


async def _until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        await asyncio.sleep(0.01)


class Watched:
    """A program whose starts are counted. `says` has the reports about it."""

    def __init__(self, tmp_path, command, serves=True):
        self._log, self._command, self._serves = tmp_path / "a.log", command, serves
        self.says = []
        self.children = []
        self.start()

    def start(self):
        self.children.append(
            ChildProcess("a", self._command, self._log, replaces_log=not self.children)
        )
        return self.children[-1]

    async def until_serving(self):
        if not self._serves:
            await asyncio.Event().wait()

    async def keep(self, until, times):
        """Keep it running until the condition holds."""
        keeping = asyncio.ensure_future(
            keep_running(self.children[0], self.start, self.until_serving, self.says.append, times)
        )
        await _until(until)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await asyncio.gather(*(child.stop(10.0) for child in self.children))


async def test_a_killed_process_returns_and_its_log_is_kept(tmp_path):
    watched = Watched(tmp_path, ["sh", "-c", "echo up; exec sleep 60"])
    await _until(watched.children[0].last_lines)
    watched.children[0].send(signal.SIGKILL)

    def back():
        return len(watched.says) == 2 and watched.children[1].last_lines() == "up\nup"

    await watched.keep(back, RestartTimes(first_s=0.01))
    assert watched.says[0].startswith("a was killed by SIGKILL and is restarted in 0.01 s. ")
    assert str(tmp_path / "a.log") in watched.says[0]
    assert watched.says[1].startswith("a is back after ")


async def test_the_delay_grows_with_repeated_failures(tmp_path):
    watched = Watched(tmp_path, ["sh", "-c", "exit 3"], serves=False)
    times = RestartTimes(first_s=0.01, longest_s=0.04)
    await watched.keep(lambda: len(watched.says) >= 5, times)
    waits = [line.split(" in ")[1].split(" s.")[0] for line in watched.says[:5]]
    assert waits == ["0.01", "0.02", "0.04", "0.04", "0.04"]
    assert all("ended with exit code 3" in line for line in watched.says)


async def test_the_delay_is_reset_after_a_long_run(tmp_path):
    watched = Watched(tmp_path, ["sh", "-c", "exit 3"])
    times = RestartTimes(first_s=0.01, steady_s=0.0)
    await watched.keep(lambda: len(watched.children) >= 4, times)
    assert {line.split(" in ")[1].split(" s.")[0] for line in watched.says if " in " in line} == {
        "0.01"
    }
