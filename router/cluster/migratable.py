"""A request at a decode node, as whoever wants it elsewhere sees it."""

import asyncio
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a move to `target` ("": there was no node to go to); because: why it stays, empty where it
    does not."""

    target: str
    because: str = ""


class Guest(Protocol):
    """For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Of the node."""
        ...

    @property
    def movable(self) -> bool:
        """Whether `move` makes sense now: a token is out, and it is not moving already."""
        ...

    def move(self, target: str = "") -> "asyncio.Task[Outcome]":
        """Begins to move it to another decode node, or to that one; done when it has moved, or
        stays, cancelled where the request ends."""
        ...
