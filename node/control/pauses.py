"""Pauses of generation: an operator begins and ends them, and is answered once they are reached.

    runs --begin--> pausing --nothing launched, the mode's work done--> paused --resume--> runs

What a pause does to the requests that are under way is the role's to do; what comes meanwhile waits
there, with its deadlines. Knows no request. The loop turns on, so the engine gives signs of life.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.pause_mode import PAUSE_MODES, PauseMode
from node.control.inside import Inside
from node.messages import Answer, Ask

PAUSED = "aborted: generation was paused"  # what is told of requests that a pause ends


@dataclass(frozen=True, slots=True)
class _Awaited:
    number: int  # of the question
    fresh: bool
    num_aborted: int
    keeps: bool  # what requests have


class Pauses:
    """Engine thread only."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []
        self._counts = dict.fromkeys(PAUSE_MODES, 0)

    def counters(self) -> dict[str, int]:
        return {f"pauses/{mode}": number for mode, number in self._counts.items()}

    def begin(self, ask: Ask, role: Inside) -> None:
        """`reached` gives the answer. Whoever is paused already may be paused in another mode."""
        mode, fresh = PauseMode(ask.argument), not role.scheduler.paused
        self._counts[mode.value] += 1
        role.scheduler.paused = True
        num_aborted = role.abort_all() if mode is PauseMode.ABORT else 0
        keeps = mode is PauseMode.IN_PLACE
        self._awaited.append(_Awaited(ask.number, fresh, num_aborted, keeps))

    def resume(self, ask: Ask, role: Inside) -> Iterator[Answer]:
        """The answer, and those of pauses that are not reached any more."""
        was_paused, role.scheduler.paused = role.scheduler.paused, False
        yield Answer(ask.number, integer=int(was_paused))
        for each in self._awaited:
            yield Answer(each.number, error="it was continued before it was paused")
        self._awaited.clear()

    def reached(self, role: Inside) -> Iterator[Answer]:
        """Those of pauses that are reached; to be called in each turn."""
        if not self._awaited or not role.scheduler.at_rest:
            return
        empty = all(each.keeps for each in self._awaited) or role.let_go()
        for each in [each for each in self._awaited if each.keeps or empty]:
            self._awaited.remove(each)
            yield Answer(each.number, integer=each.num_aborted, fresh=each.fresh)
