"""Whole systems to compare on this machine, started one at a time on free ports."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
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
        running, serving = LocalSystem(programs, self.logs / system.name, None), Serving(url)

        async def watch() -> None:
            serving.failure = await running.first_exit()

        watching = asyncio.create_task(watch())
        ready = asyncio.create_task(running.until_ready(lambda name, remark: None))
        try:
            await asyncio.wait(
                (ready, watching), timeout=self.start_s, return_when=asyncio.FIRST_COMPLETED
            )
            if serving.failure is not None:
                raise UnusableRun(f"{system.name} does not start: {serving.failure}")
            if not ready.done():
                raise UnusableRun(f"{system.name} is not ready within {self.start_s:.0f} s")
            ready.result()
            yield serving
        finally:
            ready.cancel()
            watching.cancel()
            try:
                await running.stop(_STOP_S)
            except BaseException:
                running.kill()
                raise

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

    So a gradual slowdown of the machine affects all systems alike. A system that comes twice in a
    row is one block, and is started only once.
    """
    blocks: list[tuple[ComparedSystem, list[int]]] = []
    for repeat in range(repeats):
        for system in systems if repeat % 2 == 0 else reversed(systems):
            if blocks and blocks[-1][0] is system:
                blocks[-1][1].append(repeat)
            else:
                blocks.append((system, [repeat]))
    return blocks
