"""The switch of a node from its role to another one.

    SERVING --to--> DRAINING --nothing left--> PREPARING --made--> over: the other role begins
       ^               |                          |
       `---too long----+-------it cannot be-------'

No request is lost: requests that could not migrate continue here if the switch fails. This module
knows neither streams nor the services of a role.
"""

import asyncio
import logging
from collections.abc import Callable

from common.errors import DeadlineExceeded, FailedPrecondition, NodeUnavailable, ServingError
from common.logs import kv
from node.frontend.engine_link import EngineLink, RoleProgram
from node.messages import PrepareRole

log = logging.getLogger(__name__)

PREPARE_S = 600.0  # for host pages to be pinned, and graphs to be captured


class RoleSwitch:
    """The switch away from one role. Event loop only.

    Attributes:
        successor: the next role, once this one has ended.
    """

    def __init__(
        self,
        engine: EngineLink,
        *,
        program_of: Callable[[str], RoleProgram],
        pause: Callable[[], None],
        resume: Callable[[], None],
        over: Callable[[], None],
        drain_s: float,
    ) -> None:
        """
        Args:
            program_of: returns a role by name. Raises ServingError if this node cannot have it.
            pause: accepts no new work from now on, and migrates the requests of this node.
            resume: accepts new work again.
            over: called when this role has ended.
            drain_s: longest wait for the requests of this node.
        """
        self._engine = engine
        self._program_of = program_of
        self._pause = pause
        self._resume = resume
        self._over = over
        self._drain_s = drain_s
        self._drained = asyncio.Event()
        self._under_way: asyncio.Task[None] | None = None
        self.successor: RoleProgram | None = None

    async def to(self, role: str) -> None:
        """Switch to another role. Returns when that role is about to begin. The switch continues if
        the caller is cancelled.

        Raises:
            ServingError: the node keeps its role, for the reason in the message.
        """
        self._engine.check_ready()
        program = self._program_of(role)
        if self._under_way is not None:
            raise FailedPrecondition("this node is already changing its role")
        self._under_way = task = asyncio.ensure_future(self._change(program))
        await asyncio.wait({task})
        if task.cancelled():
            raise NodeUnavailable("this node is shutting down")
        task.result()

    def drained(self) -> None:
        self._drained.set()

    def cancel(self) -> None:
        """Cancel the switch because the node ends. The node stays drained."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _change(self, program: RoleProgram) -> None:
        log.info("changing role %s", kv(to=program.role))
        self._drained.clear()
        self._pause()
        try:
            await self._until_drained()
            await self._engine.ask(PrepareRole(program.role), timeout_s=PREPARE_S)
        except ServingError as error:
            log.warning("role change failed %s", kv(to=program.role, reason=error))
            self._under_way = None
            self._resume()
            raise
        self.successor = program
        self._over()

    async def _until_drained(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._drained.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the requests of this node neither ended nor migrated within {self._drain_s:g} s"
            ) from None
