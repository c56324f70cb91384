"""States behind drafts, which are written once it is known which of these stand.

A state cannot give back what it has taken in. So a row with drafts leaves none in the forward that
computes them: a layer remembers what it has made of the row's tokens before they met, and goes
through those that stand once more. That is a small part of a forward, and needs some numbers of
each token for as long as the step takes; a state behind each draft would need as many states.
"""

from collections.abc import Callable

from kernels.linear_attention.state_cells import StateRows


class LateStates:
    """Of one step. Forward stream only."""

    def __init__(self) -> None:
        self._layers: list[Callable[[StateRows], object]] = []

    def add(self, write: Callable[[StateRows], object]) -> None:
        """A layer's way through the first of the step's tokens, those of its rows with drafts: from
        the states that it is told to those that it is told."""
        self._layers.append(write)

    def write(self, rows: StateRows) -> None:
        """Once, after the verdict.

        Args:
            rows: see ForwardBatch.states_after.
        """
        for write in self._layers:
            write(rows)
