"""Whole systems to compare on this machine, started one at a time on free ports."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.errors import UnusableRun
from cli.local import plan
from cli.local.system import LocalSystem
from common.errors import ConfigError

_STOP_S = 20.0
_TRIES = 50
_PORTS = range(20000, 32000)  # below the ephemeral port range of the operating system


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """One way to use a given number of nodes."""

    name: str
    prefill: int
    decode: int
    node_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        if not self.prefill:
            return f"{self.decode} colocated"
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(slots=True)
class Serving:
    """A running system."""

    url: str
    failure: str | None = None  # a process that ended, with the last lines of its log


@dataclass(frozen=True, slots=True)
class Machine:
    """Starts the systems of one model."""

    model: Path
    device: str
    logs: Path
    start_s: float

    @contextlib.asynccontextmanager
    async def serving(self, system: ComparedSystem) -> AsyncIterator[Serving]:
        """Start the system and yield it when it is ready. Stops it when the block ends.

        Raises:
            UnusableRun: it does not start. Contains the last lines of a log.
        """
        programs, url = self._programs(system)
        serving = Serving(url)
        async with started(system.name, programs, self.logs / system.name, self.start_s) as running:

            async def watch() -> None:
                serving.failure = await running.first_exit()

            watching = asyncio.create_task(watch())
            try:
                yield serving
            finally:
                watching.cancel()

    def _programs(self, system: ComparedSystem) -> tuple[list[plan.Program], str]:
        first = _free_block(2 + system.prefill + system.decode)
        try:
            programs = plan.programs(
                plan.RequestedSystem(
                    models=(
                        plan.RequestedModel(
                            str(self.model),
                            plan.RequestedNodes(system.prefill),
                            plan.RequestedNodes(system.decode),
                        ),
                    ),
                    host=plan.HOST,
                    port=first,
                    http_port=first + 1,
                    prefill_port=first + 2,
                    decode_port=first + 2 + system.prefill,
                    metrics_port=None,
                    device=self.device,
                    node_flags=system.node_flags,
                )
            )
        except ConfigError as error:
            raise UnusableRun(str(error)) from None
        extended = [
            replace(program, flags=(*program.flags, *system.decode_flags))
            if program.module == "decode_node"
            else program
            for program in programs
        ]
        return extended, f"http://{plan.HOST}:{first + 1}"


@contextlib.asynccontextmanager
async def started(
    name: str, programs: Sequence[plan.Program], logs: Path, start_s: float
) -> AsyncIterator[LocalSystem]:
    """Start processes and yield them when they are ready. Stops them when the block ends.

    Raises:
        UnusableRun: they are not ready within `start_s` seconds. Contains the last lines of a log.
    """
    running = LocalSystem(programs, logs, None)
    try:
        ready = asyncio.ensure_future(running.until_ready(lambda name, remark: None))
        ended = asyncio.ensure_future(running.first_exit())
        try:
            await asyncio.wait((ready, ended), timeout=start_s, return_when="FIRST_COMPLETED")
            if ended.done():
                raise UnusableRun(f"{name} does not start: {ended.result()}")
            if not ready.done():
                raise UnusableRun(f"{name} is not ready within {start_s:.0f} s")
            ready.result()
        finally:
            ready.cancel()
            ended.cancel()
        yield running
    finally:
        try:
            await running.stop(_STOP_S)
        except BaseException:
            running.kill()
            raise


def _free_block(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(_TRIES):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        if not any(plan.busy(plan.HOST, port) for port in range(first, first + count)):
            return first
    raise UnusableRun(f"no {count} free ports in a row between {_PORTS.start} and {_PORTS.stop}")


def abba(
    systems: tuple[ComparedSystem, ...], repeats: int
) -> list[tuple[ComparedSystem, list[int]]]:
    """Return the order of systems and their repeats: forwards, backwards, and so on.

    So a gradual slowdown of the machine affects all systems equally. Two adjacent runs of one
    system are one block, for which it is started only once.
    """
    blocks: list[tuple[ComparedSystem, list[int]]] = []
    for repeat in range(repeats):
        for system in systems if repeat % 2 == 0 else reversed(systems):
            if blocks and blocks[-1][0] is system:
                blocks[-1][1].append(repeat)
            else:
                blocks.append((system, [repeat]))
    return blocks
