"""The prefill delayer: nodes of a group compute their prompts in the same steps.

All nodes of a group wait for the one whose step takes longest, and a step with a prompt takes much
longer than one of decode rows. While decode rows run, a node therefore announces its prompts one
step ahead. They wait, for a limited number of steps, until most nodes that could compute prompts
have some.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduler.next_rows import RowSelector, SelectedRows

MAX_PASSES = 30


class PrefillCounts(NamedTuple):
    """Numbers of nodes of a group.

    Attributes:
        with_room: a prompt could be admitted there.
        ready: of those, prompts wait there.
        decoding: decode rows run there, which a prompt would delay.
        chunking: a prompt is between two of its chunks there, and is not delayed.
    """

    with_room: int
    ready: int
    decoding: int
    chunking: int


def decide(counts: PrefillCounts, waited: int) -> bool:
    """Return whether prompts are computed in the next step.

    Args:
        waited: number of steps that prompts have waited for each other so far.
    """
    costs_nothing = not counts.decoding or counts.chunking > 0
    return costs_nothing or 2 * counts.ready > counts.with_room or waited >= MAX_PASSES


class PrefillGate:
    """The choice of each forward's rows, without prompts while the gate is closed.

    Attributes:
        is_open: set by the group before each choice.
    """

    def __init__(self, rows: RowSelector) -> None:
        self._rows = rows
        self.is_open = True

    @property
    def reserved_pages(self) -> int:
        return self._rows.reserved_pages

    def turns(self) -> Sequence[bool]:
        return self._rows.turns()

    def choose(self, alone: bool) -> SelectedRows | None:
        if self.is_open or alone:
            return self._rows.choose(alone)
        return self._rows.choose_decodes()
