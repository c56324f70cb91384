"""Operator-requested end of a router's processes: all at once, or as a rolling restart.

In a rolling restart each process is started again before the next one ends. Independent of how
processes are run.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from api.admin.router_state import STATE
from common.logs import kv
from protos.router_pb2 import WorkerState
from router.workers.asking import SiblingProcesses, Tell
from router.workers.ends import IN_TURN, PATH

log = logging.getLogger(__name__)

_LONGEST_S = 600.0  # for one process: its drain, its start and its first ready state
_LOOK_S = 0.1


class RenewableProcess(Protocol):
    """A process that can be restarted."""

    async def renew(self) -> None:
        """Drain the process, and return when its successor listens."""


class CertificateRenewal:
    """Restarts of the processes of a router. For one event loop."""

    def __init__(
        self,
        processes: Sequence[RenewableProcess],
        routers: SiblingProcesses,
        end_all: Callable[[], None],
    ) -> None:
        """
        Args:
            routers: client of the same processes, by their numbers in `processes`.
            end_all: drains all processes and thereby the router.
        """
        self._processes = processes
        self._routers = routers
        self._end_all = end_all
        self._turns: asyncio.Task[None] | None = None

    @property
    def tells(self) -> Mapping[str, Tell]:
        """Return the handler for requests of the processes."""

        async def tell(query: Mapping[str, str]) -> bytes:
            if query[IN_TURN] == "no":
                self._end_all()
            elif self._turns is None or self._turns.done():
                self._turns = asyncio.create_task(self._take_turns())
            return b""

        return {PATH: tell}

    def close(self) -> None:
        """Stop the rolling restart."""
        if self._turns is not None:
            self._turns.cancel()

    async def _take_turns(self) -> None:
        """Restart one process after the other.

        Stop at one that does not come back, and leave the others as they are.
        """
        for number, process in enumerate(self._processes):
            log.info("router process restarted %s", kv(process=number))
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await process.renew()
                    while not await self._serves(number):  # noqa: ASYNC110  (it is another process)
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                log.error(
                    "router process did not restart in time %s",
                    kv(process=number, after_s=_LONGEST_S),
                )
                return
        log.info("all router processes restarted")

    async def _serves(self, number: int) -> bool:
        told = await self._routers.ask(STATE)
        worker = WorkerState.FromString(told.bodies.get(number, b""))
        return worker.state.state == "ready"
