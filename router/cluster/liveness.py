"""Liveness of the engine of a decode node, and the requests that can be migrated from a node."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.process.standstill import StallMonitor

_LONGEST_LOOK_S = 0.5


# Liveness of a decode node's engine, by the heartbeats on its Serve stream.
#
# A responsive node process proves nothing: its engine may be stalled, and a node that finishes
# nothing looks like the least busy one. So there are two limits of silence: after the first, the
# node gets no new requests. After the second, its requests are given up.
@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Limits for a silent engine, in seconds. Heartbeats come once a second."""

    silent_s: float = 5.0  # until the engine counts as silent
    dead_s: float = 10.0  # until it counts as dead


class EngineLiveness:
    """Liveness of the engine behind one stream, from its opening on. For one event loop.

    It counts as silent until the first heartbeat: a node may be stalled when a stream opens.
    """

    def __init__(self, patience: LivenessLimits, on_change: Callable[[], None]) -> None:
        """Start as silent.

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
        """Note a heartbeat.

        Args:
            late_s: seconds by which the engine's progress is overdue: its silence began then.
        """
        late_s = late_s if late_s > 0.0 else 0.0  # NaN counts as 0
        self._standstill.moved(late_s)
        if late_s < self._patience.silent_s:
            self._report(moves=True)

    async def until_dead(self) -> None:
        """Wait until the engine counts as dead. Returns at once while it stays dead."""
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
    """Result of a migration.

    `target` is "" if there was no node to migrate to. `because` is the reason why the request
    stays, or empty after success.
    """

    target: str
    because: str = ""


class MigratableRequest(Protocol):
    """A request that can be migrated. For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Address of its node."""
        ...

    @property
    def movable(self) -> bool:
        """True if `migrate` may be called: the request has a token and no migration in progress."""
        ...

    def migrate(self, target: str = "") -> "asyncio.Task[MigrationOutcome]":
        """Start to migrate it to `target`, or to any decode node.

        The task ends when the request has migrated or stays. It is cancelled if the request ends.
        """
        ...
