"""Whether the engine of a decode node moves, by the beats that come up one Serve stream.

A front that answers proves nothing: the engine behind it may stand still, and a node that finishes
nothing looks like the least busy of all. So there are two limits: a silence after which nothing new
goes there, and one after which nothing is waited for. Knows no requests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.process.standstill import Standstill

_LONGEST_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds without progress of the engine; heartbeats come once a second."""

    silent_s: float = 5.0  # until the engine counts as silent
    dead_s: float = 10.0  # until it counts as dead


class EnginePulse:
    """Of one stream, from its opening on. For one event loop.

    Silent until the first beat: a node that is called anew may still stand still.
    """

    def __init__(self, patience: Patience, on_change: Callable[[], None]) -> None:
        """
        Args:
            on_change: called when `moves` or `dead` has changed.
        """
        self.moves = False
        self.dead = False
        self._patience = patience
        self._on_change = on_change
        self._look_s = min(_LONGEST_LOOK_S, patience.silent_s / 4)
        self._standstill = Standstill(self._look_s)

    def beat(self, late_s: float = 0.0) -> None:
        """Note a heartbeat.

        Args:
            late_s: seconds by which the engine's progress is overdue: its silence began then.
        """
        late_s = late_s if late_s > 0.0 else 0.0  # NaN is none
        self._standstill.moved(late_s)
        if late_s < self._patience.silent_s:
            self._tell(moves=True)

    async def until_dead(self) -> None:
        """Returns when the engine counts as dead; goes on to return until it beats."""
        while (silence_s := self._standstill.look()) < self._patience.dead_s:
            if silence_s >= self._patience.silent_s:
                self._tell(moves=False)
            await asyncio.sleep(self._look_s)
        self._tell(moves=False, dead=True)

    def _tell(self, *, moves: bool, dead: bool = False) -> None:
        if (moves, dead) != (self.moves, self.dead):
            self.moves, self.dead = moves, dead
            self._on_change()
