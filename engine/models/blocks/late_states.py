"""Recurrent states of rows with drafts, written after verification.

A recurrent state cannot be rolled back. So the forward that verifies a row's drafts writes no state
for that row. Each layer keeps the row's inputs to the recurrence, and runs the recurrence again
over the accepted tokens. That is a small part of a forward. It needs some numbers of each token
until the step ends. The alternative, one state after each draft, would need as many states as there
are drafts.
"""

from collections.abc import Callable

from torch import Tensor

from kernels.linear_attention.state_cells import StateRows


class LateStates:
    """The pending state updates of one step. Forward stream only.

    Those of a captured graph are captured with it. They read what its newest replay has written.

    Attributes:
        guessed: the device has drawn the drafts of the step, so a draft model has their KV.
    """

    def __init__(self, *, guessed: bool = False) -> None:
        self.guessed = guessed
        self._layers: list[Callable[[StateRows, int], object]] = []
        self._drafters: list[Callable[[Tensor], object]] = []

    def add(self, write: Callable[[StateRows, int], object]) -> None:
        """Add a layer's state update over the step's first tokens, which belong to rows with
        drafts.

        Args:
            write: updates the states as its StateRows argument specifies. Its second argument is
                the number of these tokens.
        """
        self._layers.append(write)

    def add_drafter(self, store: Callable[[Tensor], object]) -> None:
        """Add an update of a drafter's state.

        Args:
            store: stores what the rows need to continue. Its argument is int64 [num_rows], places
                of the rows' last accepted tokens in the step.
        """
        self._drafters.append(store)

    def write(self, rows: StateRows, num_tokens: int) -> None:
        """Run the state updates of all layers once, after verification.

        Args:
            rows: see ForwardBatch.states_after.
            num_tokens: of these rows.
        """
        for write in self._layers:
            write(rows, num_tokens)

    def continue_from(self, places: Tensor) -> None:
        """Run the updates of drafters once, after verification.

        Args:
            places: see `add_drafter`.
        """
        for store in self._drafters:
            store(places)
