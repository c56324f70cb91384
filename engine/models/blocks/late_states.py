"""Recurrent states of rows with drafts, written after verification.

A recurrent state cannot be rolled back. So the forward that verifies a row's drafts writes no state
for that row. Each layer keeps the row's inputs to the recurrence, and runs the recurrence again
over the accepted tokens. That is a small part of a forward. It needs some numbers of each token
until the step ends. The alternative, one state after each draft, would need as many states as there
are drafts.
"""

from collections.abc import Callable

from kernels.linear_attention.state_cells import StateRows


class LateStates:
    """The pending state updates of one step. Forward stream only."""

    def __init__(self) -> None:
        self._layers: list[Callable[[StateRows], object]] = []

    def add(self, write: Callable[[StateRows], object]) -> None:
        """Add a layer's state update over the step's first tokens, which belong to rows with
        drafts.

        Args:
            write: updates the states as its StateRows argument specifies.
        """
        self._layers.append(write)

    def write(self, rows: StateRows) -> None:
        """Run all state updates once, after verification.

        Args:
            rows: see ForwardBatch.states_after.
        """
        for write in self._layers:
            write(rows)
