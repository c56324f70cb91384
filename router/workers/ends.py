"""Who ends a router when an operator's call asks for it: the one process that it is, or the one
that keeps the several that it is."""

from collections.abc import Callable
from typing import Protocol

from common.errors import NodeUnavailable, WrongState
from router.workers.asking import Siblings

PATH = "/drain"  # as the keeper is asked
IN_TURN = "in_turn"  # of its query, "yes" or "no"


class Ends(Protocol):
    async def drain(self, *, in_turn: bool) -> None:
        """Begins it; in_turn: as in DrainRouterRequest. Raises ServingError."""


class OwnEnd:
    """Of a router that is one process."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    async def drain(self, *, in_turn: bool) -> None:
        if in_turn:
            raise WrongState("this router is one process: there is no turn to take")
        self._begin()


class KeptEnd:
    """Of one of several processes."""

    def __init__(self, keeper: Siblings) -> None:
        self._keeper = keeper

    async def drain(self, *, in_turn: bool) -> None:
        told = await self._keeper.ask(PATH, **{IN_TURN: "yes" if in_turn else "no"})
        if told.num_silent:
            raise NodeUnavailable("the process that keeps this one does not answer")
