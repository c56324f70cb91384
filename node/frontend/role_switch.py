"""The way of a node from its role to another one, or back to what it was.

    SERVING --to--> DRAINING --nothing left--> PREPARING --made--> over: the other role begins
       ^               |                          |
       `---too long----+-------it cannot be-------'

Until it is over the node has lost nothing: what could not go elsewhere goes on here. Knows neither
streams nor what a role is made of.
"""

import asyncio
import logging
from collections.abc import Callable

from common.errors import DeadlineExceeded, NodeUnavailable, ServingError, WrongState
from common.logs import kv
from node.frontend.engine_link import EngineLink
from node.frontend.parts import RoleProgram

log = logging.getLogger(__name__)

PREPARE_S = 600.0  # for host pages to be pinned, and graphs to be captured


class RoleSwitch:
    """Of one role's time. Event loop only.

    Attributes:
        successor: the next role, once this one is over.
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
            program_of: a role's name; raises ServingError where this node cannot have it.
            pause: takes no new work from now on, and has what is here go elsewhere.
            resume: takes it again.
            over: this role is.
            drain_s: longest wait for what is here.
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
        """Returns when the other role is about to begin, whoever waits for that or not.

        Raises:
            ServingError: with why the node goes on as it is.
        """
        self._engine.check_ready()
        program = self._program_of(role)
        if self._under_way is not None:
            raise WrongState("this node is about to take another role already")
        self._under_way = task = asyncio.ensure_future(self._change(program))
        await asyncio.wait({task})
        if task.cancelled():
            raise NodeUnavailable("this node ends")
        task.result()

    def drained(self) -> None:
        """Nothing is left to do."""
        self._drained.set()

    def cancel(self) -> None:
        """The node ends, and stays drained until then."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _change(self, program: RoleProgram) -> None:
        log.info("switching %s", kv(to=program.role))
        self._drained.clear()
        self._pause()
        try:
            await self._until_drained()
            await self._engine.ask("prepare", program.role, timeout_s=PREPARE_S)
        except ServingError as error:
            log.warning("not switched %s", kv(to=program.role, because=error))
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
                f"what is here has neither ended nor moved within {self._drain_s:g} s"
            ) from None
