"""Pauses of generation: an operator starts and ends them, and gets the answer once they are
reached.

    runs --begin--> pausing --nothing launched, the mode's work done--> paused --resume--> runs

The role handles the requests in progress. New requests wait there, with their deadlines. This
module knows no request. The loop continues to turn, so the engine sends heartbeats.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.pausing import PAUSE_MODES, PauseMode
from node.control.inside import ControlledRole
from node.messages import NodeCallResult

PAUSED = "aborted: generation was paused"  # error of requests that a pause ends


@dataclass(frozen=True, slots=True)
class _Awaited:
    number: int  # of the question
    fresh: bool
    num_aborted: int
    keeps: bool  # whether requests keep their KV


class Pauses:
    """Operators' pauses. Engine thread only."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []
        self._counts = dict.fromkeys(PAUSE_MODES, 0)

    def counters(self) -> dict[str, int]:
        return {f"pauses/{mode}": number for mode, number in self._counts.items()}

    def begin(self, number: int, mode: PauseMode, role: ControlledRole) -> None:
        """Start a pause. `reached` yields the answer. A paused node may be paused again in another
        mode.
        """
        fresh = not role.scheduler.paused
        self._counts[mode.value] += 1
        role.scheduler.paused = True
        num_aborted = role.abort_all() if mode is PauseMode.ABORT else 0
        keeps = mode is PauseMode.IN_PLACE
        self._awaited.append(_Awaited(number, fresh, num_aborted, keeps))

    def resume(self, number: int, role: ControlledRole) -> Iterator[NodeCallResult]:
        """End the pause. Yields its answer, and errors for pauses that were not reached."""
        was_paused, role.scheduler.paused = role.scheduler.paused, False
        yield NodeCallResult(number, integer=int(was_paused))
        for each in self._awaited:
            yield NodeCallResult(each.number, error="it was continued before it was paused")
        self._awaited.clear()

    def reached(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers of pauses that are reached. Called in each turn of the loop."""
        if not self._awaited or not role.scheduler.at_rest:
            return
        empty = all(each.keeps for each in self._awaited) or role.release_kv()
        for each in [each for each in self._awaited if each.keeps or empty]:
            self._awaited.remove(each)
            yield NodeCallResult(each.number, integer=each.num_aborted, fresh=each.fresh)
