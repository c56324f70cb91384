"""A request at a decode node, as whoever wants it elsewhere sees it."""

import asyncio
from typing import Protocol


class Guest(Protocol):
    """For one event loop."""

    @property
    def movable(self) -> bool:
        """Whether `move` makes sense now: a token is out, and it is not moving already."""
        ...

    def move(self) -> "asyncio.Task[None]":
        """Begins to move it to another decode node; done when it has moved, or stays."""
        ...
