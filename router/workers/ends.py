"""Shutdown of a router by an operator's call, for routers with one process and with several."""

from collections.abc import Callable
from typing import Protocol

from common.errors import FailedPrecondition, NodeUnavailable
from router.workers.asking import SiblingProcesses

PATH = "/drain"  # path of the call to the keeper
IN_TURN = "in_turn"  # query parameter, "yes" or "no"


class OperatorEnds(Protocol):
    async def drain(self, *, in_turn: bool) -> None:
        """Begin the shutdown. `in_turn`: as in DrainRouterRequest. Raises ServingError."""


class LocalEnd:
    """Shutdown of a router with one process."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    async def drain(self, *, in_turn: bool) -> None:
        if in_turn:
            raise FailedPrecondition("this router is one process: there is no turn to take")
        self._begin()


class SharedEnd:
    """Shutdown of a router with several processes, through their keeper."""

    def __init__(self, keeper: SiblingProcesses) -> None:
        self._keeper = keeper

    async def drain(self, *, in_turn: bool) -> None:
        told = await self._keeper.ask(PATH, **{IN_TURN: "yes" if in_turn else "no"})
        if told.num_silent:
            raise NodeUnavailable("the process that keeps this one does not answer")
