"""Liveness of decode nodes' engines, and the interface of requests that can migrate."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.process.standstill import StallMonitor

_LONGEST_LOOK_S = 0.5


# A responsive server process proves nothing: its engine may be stalled, and a node that finishes
# nothing looks least loaded. So silence has two limits: after the first the node gets no new
# requests, and after the second its requests are replayed on other nodes.
@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Limits for a silent engine, in seconds. Heartbeats come once a second."""

    silent_s: float = 5.0  # silence after which the node gets no new requests
    dead_s: float = 10.0  # silence after which its requests are replayed


class EngineLiveness:
    """Liveness of the engine behind one stream. For one event loop.

    Silent until the first heartbeat, because a node may already be stalled when a stream opens.
    """

    def __init__(self, patience: LivenessLimits, on_change: Callable[[], None]) -> None:
        """Create it in the silent state.

        Args:
            patience: limits of silence.
            on_change: called when `moves` or `dead` has changed.
        """
        self.moves = False
        self.dead = False
        self._patience = patience
        self._on_change = on_change
        self._look_s = min(_LONGEST_LOOK_S, patience.silent_s / 4)
        self._standstill = StallMonitor(self._look_s)

    def heartbeat(self, late_s: float = 0.0) -> None:
        """Record a heartbeat.

        Args:
            late_s: seconds for which the engine has made no progress. Its silence counts from then.
        """
        late_s = late_s if late_s > 0.0 else 0.0  # NaN counts as 0
        self._standstill.moved(late_s)
        if late_s < self._patience.silent_s:
            self._report(moves=True)

    async def until_dead(self) -> None:
        """Wait until the engine counts as dead. Returns immediately if it does already."""
        while (silence_s := self._standstill.look()) < self._patience.dead_s:
            if silence_s >= self._patience.silent_s:
                self._report(moves=False)
            await asyncio.sleep(self._look_s)
        self._report(moves=False, dead=True)

    def _report(self, *, moves: bool, dead: bool = False) -> None:
        if (moves, dead) != (self.moves, self.dead):
            self.moves, self.dead = moves, dead
            self._on_change()


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """Result of a live migration.

    `target` is "" if no node could accept the request. `because` is the reason why the request
    stays, or "" after success.
    """

    target: str
    because: str = ""


class MigratableRequest(Protocol):
    """A request that can be migrated. For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Address of its decode node."""
        ...

    @property
    def movable(self) -> bool:
        """True if `migrate` may be called: it has a token, and no migration is in progress."""
        ...

    def migrate(self, target: str = "") -> "asyncio.Task[MigrationOutcome]":
        """Start a migration to `target`, or to any decode node.

        The task ends when the request has migrated or stays. It is cancelled if the request ends.
        """
        ...
