"""The end of a node: its causes, and one verdict, decided by the first cause.

wanted (SIGTERM, SIGINT, Drain) -> drained | drain time over | second signal: exit code 0
A signal after a Drain call is the first one: Kubernetes' preStop calls, then it sends SIGTERM.
fault at any time: exit code 1, or 2 if the user must fix the configuration

A role may end before, and the node continues in another one. A request to end the node stays valid
then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from common.errors import EngineFault
from common.logs import kv

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExitVerdict:
    reason: str
    exit_code: int = 0
    in_order: bool = False  # no work was in progress any more
    engine_died: bool = False


class ProcessExit:
    """The causes of a node's end. Event loop only."""

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._role_over = asyncio.Event()
        self._signalled = False
        self._verdict: asyncio.Future[ExitVerdict] = asyncio.get_running_loop().create_future()

    def signalled(self, name: str) -> None:
        """Handle a signal. The first one asks for a drain, any other one ends the node
        immediately.
        """
        if self._signalled:
            self.now(f"second signal {name}")
        self._signalled = True
        self.want(name)

    def want(self, who: str) -> None:
        """Ask for a drain. Idempotent."""
        if not self._wanted.is_set():
            log.info("draining %s", kv(reason=who))
            self._wanted.set()

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    def drained(self) -> None:
        """Record that no work is left. A node that was not asked to end stays."""
        if self.wanted:
            self._decide(ExitVerdict("drained", in_order=True))

    def role_over(self) -> None:
        """Record that the node has finished its role and continues in another one."""
        self._role_over.set()

    def now(self, reason: str) -> None:
        """End the node as requested, without waiting for anything."""
        self._decide(ExitVerdict(reason))

    def fault(self, reason: str, exit_code: int = 1) -> None:
        self._decide(ExitVerdict(reason, exit_code))

    def engine_died(self, reason: str) -> None:
        self._decide(ExitVerdict(reason, 1, engine_died=True))

    async def verdict(self, begin_drain: Callable[[], None], drain_s: float) -> ExitVerdict | None:
        """Wait for the end of the node, or of its role (None). `begin_drain` is called once a drain
        is wanted. From then on the drain may take `drain_s`.
        """
        wanted = asyncio.ensure_future(self._wanted.wait())
        over = asyncio.ensure_future(self._role_over.wait())
        either: set[asyncio.Future[Any]] = {wanted, over, self._verdict}
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        wanted.cancel()
        over.cancel()
        if not self._verdict.done():
            if self._role_over.is_set():
                self._role_over.clear()
                return None
            begin_drain()
            await asyncio.wait({self._verdict}, timeout=drain_s)
            self.now(f"requests were still running after {drain_s:g} s")
        return self._verdict.result()

    async def _guarding(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the front. A fault in it ends the node."""
        try:
            await work
        except EngineFault as error:
            self.engine_died(str(error))
        except Exception as error:
            log.exception("server process failed")
            self.fault(f"the front failed: {type(error).__name__}: {error}")

    @asynccontextmanager
    async def guarded(self, work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Run these parts of the front inside the context, then cancel them."""
        tasks = [asyncio.ensure_future(self._guarding(each)) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def before(self, done: asyncio.Future[Any], timeout_s: float) -> ExitVerdict | None:
        """Wait until `done` and return None. If the node ends before, or `timeout_s` expires, which
        ends it, return the verdict.
        """
        either: set[asyncio.Future[Any]] = {done, self._verdict}
        await asyncio.wait(either, timeout=timeout_s, return_when="FIRST_COMPLETED")
        if done.done() and not self._verdict.done():
            return None
        done.cancel()
        self.fault(f"the engine has not begun another role within {timeout_s:g} s")
        return self._verdict.result()

    def _decide(self, verdict: ExitVerdict) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)
