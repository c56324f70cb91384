"""Runs a system's processes as children: start, health checks, restarts, shutdown."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cli import client
from cli.local import plan
from common import tls
from common.process.children import ChildProcess
from common.process.waiting import first_of
from node.frontend.frontend import exit_sentence

# Callers stop before the processes that they call, so that no call waits for a stopped node.
STOP_ORDER = ("router", "simulation.fleet", "decode_node", "prefill_node", "encode_node")


# Seconds between reports about processes that are still starting. An ordinary start takes less.
PROGRESS_S = 20.0
_MAX_PROGRESS = 120  # characters of a report


class LocalSystem:
    """The processes of a system, as children of this process."""

    def __init__(
        self,
        programs: Sequence[plan.Program],
        logs: Path,
        certificates: tls.Certificates | None,
    ) -> None:
        self._programs = programs
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs.chmod(0o700)
        self._logs = logs
        self._certificates = certificates
        self._children = {program: self._child(program) for program in programs}

    @property
    def names(self) -> list[str]:
        return [program.name for program in self._programs]

    def pid(self, name: str) -> int:
        """Return the id of the process of this name. Raises ValueError if no process has it."""
        pids = {program.name: child.pid for program, child in self._children.items()}
        if name not in pids:
            raise ValueError(f"process {name} does not exist: the processes are {[*pids]}")
        return pids[name]

    async def until_ready(
        self,
        report: Callable[[str, str], None],
        progress: Callable[[str, str], None] = lambda name, message: None,
    ) -> None:
        """Wait until every process is healthy, and the router can place a request.

        Args:
            report: called with the name and the address of each process that is ready.
            progress: see `report_progress`.
        """
        starting = set(self._children.values())

        async def wait(program: plan.Program) -> None:
            await self._until_serving(program)
            starting.discard(self._children[program])
            several = f"{len(program.nodes)} nodes" if program.nodes else ""
            report(program.name, several or program.address)

        reports = asyncio.ensure_future(report_progress(starting, progress))
        try:
            await asyncio.gather(*(wait(program) for program in self._programs))
        finally:
            reports.cancel()

    async def first_exit(self) -> str:
        """Wait until a process ends on its own. Returns a description for the user."""
        children = [*self._children.values()]
        ends = await first_of(*(child.ended() for child in children))
        child = next(each for each, end in zip(children, ends, strict=True) if end is not None)
        return (
            f"{child.name} has ended with code {child.code}. The end of {child.log}:\n\n"
            f"{child.last_lines()}\n"
        )

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Restart every process that ends on its own, until cancelled."""

        async def keep(program: plan.Program) -> None:
            def start_again() -> ChildProcess:
                self._children[program] = child = self._child(program, replaces_log=False)
                return child

            serving = partial(self._until_serving, program)
            await keep_running(self._children[program], start_again, serving, say)

        await asyncio.gather(*(keep(program) for program in self._programs))

    async def stop(self, patience_s: float) -> list[str]:
        """Stop all processes. Returns a description of each failure."""
        wrong = []
        for module in STOP_ORDER:
            group = [c for program, c in self._children.items() if program.module == module]
            alive = [child for child in group if child.code is None]
            await asyncio.gather(*(child.stop(patience_s) for child in alive))
            wrong += [
                f"{child.name} ended with code {child.code}"
                for child in alive
                if child.code not in (0, -signal.SIGTERM)  # SIGTERM: the process had hardly started
            ]
        return wrong

    def kill(self) -> None:
        for child in self._children.values():
            child.send(signal.SIGKILL)

    def _child(self, program: plan.Program, *, replaces_log: bool = True) -> ChildProcess:
        log = self._logs / f"{program.name}.log"
        return ChildProcess(
            program.name,
            program.command,
            log,
            environment=program.environment,
            replaces_log=replaces_log,
        )

    async def _until_serving(self, program: plan.Program) -> None:
        for server in program.servers:
            for service in server.services:
                await client.until_serving(server.address, service, self._certificates)


async def report_progress(
    starting: Collection[ChildProcess],
    progress: Callable[[str, str], None],
    interval_s: float = PROGRESS_S,
) -> None:
    """Report the newest line in the log of each starting process, until cancelled.

    A first start may compile kernels or load weights for minutes.

    Args:
        starting: processes that are not ready. The caller removes them.
        progress: called with the name of a process and the message of the line, if it is new.
    """
    reported: dict[str, str] = {}
    while True:
        await asyncio.sleep(interval_s)
        for child in starting:
            line = child.last_lines(1)
            if line and reported.get(child.name) != line:
                reported[child.name] = line
                progress(child.name, _message(line)[:_MAX_PROGRESS])


def _message(line: str) -> str:
    """Return the message of a log line, in text or JSON."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        _, _, message = line.partition(": ")  # after time, level, program and logger
        return message or line


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Restart delays in seconds."""

    first_s: float = 1.0  # delay after a crash. Doubles with every further crash
    longest_s: float = 30.0
    steady_s: float = 60.0  # uptime after which earlier crashes no longer count


async def keep_running(
    child: ChildProcess,
    start_again: Callable[[], ChildProcess],
    until_serving: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    times: RestartTimes | None = None,
) -> None:
    """Restart a running process after each crash, until cancelled.

    Args:
        start_again: starts the process. Called after the previous one has ended.
        until_serving: returns once the newest process serves. Cancelled if the process ends first.
        say: receives a line about each crash and each recovery.
    """
    times = times or RestartTimes()
    wait_s, began = times.first_s, time.monotonic()
    while True:
        code = await child.ended()
        if time.monotonic() - began >= times.steady_s:
            wait_s = times.first_s
        say(
            f"{child.name} {exit_sentence(code)} and is restarted in {wait_s:g} s. "
            f"Its log: {child.log}"
        )
        await asyncio.sleep(wait_s)
        wait_s, began = min(2 * wait_s, times.longest_s), time.monotonic()
        child = start_again()
        _, ended = await first_of(until_serving(), child.ended())  # a process may never serve
        if ended is None:
            say(f"{child.name} is back after {time.monotonic() - began:.1f} s")
