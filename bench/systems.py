"""Whole systems on this machine, started one at a time on free ports."""

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
# Below the ephemeral port range of the operating system.
_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """One way to use the same number of nodes."""

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
    death: str | None = None  # a process that died, with the end of its log


@dataclass(frozen=True, slots=True)
class Machine:
    """Starter of the arms of one model."""

    model: Path
    device: str
    logs: Path
    start_s: float

    @contextlib.asynccontextmanager
    async def serving(self, arm: ComparedSystem) -> AsyncIterator[Serving]:
        """Start the arm and yield it when it is ready. Ends it when the block is left, in any way.

        Raises:
            UnusableRun: it does not start. Contains the end of a log.
        """
        programs, url = self._programs(arm)
        system = LocalSystem(programs, self.logs / arm.name, None)
        serving = Serving(url)
        watching = asyncio.create_task(_watch(system, serving))
        try:
            await self._until_ready(arm, system, watching, serving)
            yield serving
        finally:
            watching.cancel()
            try:
                await system.stop(_STOP_S)
            except BaseException:
                system.kill()
                raise

    async def _until_ready(
        self,
        arm: ComparedSystem,
        system: LocalSystem,
        watching: "asyncio.Task[None]",
        serving: Serving,
    ) -> None:
        ready = asyncio.create_task(system.until_ready(lambda name, remark: None))
        try:
            await asyncio.wait(
                (ready, watching), timeout=self.start_s, return_when=asyncio.FIRST_COMPLETED
            )
            if serving.death is not None:
                raise UnusableRun(f"{arm.name} does not come up: {serving.death}")
            if not ready.done():
                raise UnusableRun(f"{arm.name} is not ready within {self.start_s:.0f} s")
            ready.result()
        finally:
            ready.cancel()

    def _programs(self, arm: ComparedSystem) -> tuple[list[plan.Program], str]:
        first = _free_block(2 + arm.prefill + arm.decode)
        try:
            programs = plan.programs(
                plan.RequestedSystem(
                    model=str(self.model),
                    prefill=arm.prefill,
                    decode=arm.decode,
                    host=plan.HOST,
                    port=first,
                    http_port=first + 1,
                    prefill_port=first + 2,
                    decode_port=first + 2 + arm.prefill,
                    metrics_port=None,
                    device=self.device,
                    node_flags=arm.node_flags,
                )
            )
        except ConfigError as error:
            raise UnusableRun(str(error)) from None
        extended = [
            replace(program, flags=(*program.flags, *arm.decode_flags))
            if program.module == "decode_node"
            else program
            for program in programs
        ]
        return extended, f"http://{plan.HOST}:{first + 1}"


async def _watch(system: LocalSystem, serving: Serving) -> None:
    serving.death = await system.first_death()


def _free_block(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(_TRIES):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        if not any(plan.busy(plan.HOST, port) for port in range(first, first + count)):
            return first
    raise UnusableRun(f"no {count} free ports in a row between {_PORTS.start} and {_PORTS.stop}")


def abba(arms: tuple[ComparedSystem, ...], repeats: int) -> list[tuple[ComparedSystem, list[int]]]:
    """Return the order of arms and their repeats: forwards, backwards, and so on.

    With this order a gradual slowdown of the machine affects all arms alike. An arm that comes
    twice in a row is one block, and is started only once.
    """
    blocks: list[tuple[ComparedSystem, list[int]]] = []
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            if blocks and blocks[-1][0] is arm:
                blocks[-1][1].append(repeat)
            else:
                blocks.append((arm, [repeat]))
    return blocks
