"""CUDA graphs of the end of a step: the model's head, sampling, and the tokens for the next step.

They serve steps whose tokens depend only on hidden states and sampling parameters. Greedy and other
rows share one graph per number of rows, because a greedy row has temperature 0.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from engine.batch.upload import HostColumn
from kernels.sampling.sample import SamplingColumns

NUM_INPUTS = 1 + len(fields(SamplingColumns))

# Chooses tokens from hidden states [n, hidden], and stores them for the next step as the last
# tokens of n slots (int64).
Choose: TypeAlias = Callable[[Tensor, SamplingColumns, Tensor], Tensor]


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Repeat the work on the current stream: the same launches on the same addresses."""
        ...


def choice_padding(num_rows: int, no_slot: int) -> list[HostColumn]:
    """Return the inputs of greedy rows in host memory: their slots, then SamplingColumns.

    Args:
        no_slot: number of a slot that no request uses.
    """
    nothing = np.zeros(num_rows, np.int32)
    return [
        np.full(num_rows, no_slot),
        np.zeros(num_rows, np.float32),  # temperature
        nothing,  # top_k
        np.ones(num_rows, np.float32),  # top_p
        np.zeros(num_rows, np.float32),  # min_p
        np.zeros((num_rows, 2), np.int32),  # seeds
        nothing,  # positions
    ]


class ChoiceGraphs:
    """Captures and replays these graphs. For use on the forward stream only.

    Args:
        record: see Recorder.
        hidden: hidden states of the newest forward, [most rows or more, hidden].
        inputs: `choice_padding` for the maximum number of rows, on the device. A step replaces the
            first entries.
    """

    def __init__(
        self,
        choose: Choose,
        record: Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]],
        hidden: Tensor,
        inputs: Sequence[Tensor],
    ) -> None:
        self._choose = choose
        self._record = record
        self._hidden = hidden
        self._inputs = inputs
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        self._captured: list[int] = []  # ascending
        self._possible = True

    @property
    def slots(self) -> Tensor:
        """The slots of the newest step's rows, then padding: int64 [most rows]."""
        return self._inputs[0]

    @property
    def positions(self) -> Tensor:
        """SamplingColumns.positions of the newest step, then padding: int32 [most rows]."""
        return self._inputs[-1]

    def capture(self, num_rows: int) -> None:
        """Capture the graph for a number of rows. It needs memory for their logits."""
        if not self._possible:
            return
        hidden = self._hidden[:num_rows]
        slots, *columns = [each[:num_rows] for each in self._inputs]
        parameters = SamplingColumns(*columns)
        self._graphs[num_rows] = self._record(lambda: self._choose(hidden, parameters, slots))
        insort(self._captured, num_rows)

    def give_up(self) -> None:
        """Remove all graphs, and capture no more."""
        self._possible = False
        self._graphs.clear()
        self._captured.clear()

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for this many rows."""
        return bool(self._captured) and num_rows <= self._captured[-1]

    def move(self, early: Tensor) -> None:
        """Subtract int32 [any] from the positions of the first rows."""
        self.positions[: len(early)].sub_(early)

    def replay(self, num_rows: int) -> Tensor:
        """Choose the tokens of the first rows of the newest forward: int32 [num_rows], valid until
        the next `replay`."""
        graph, tokens = self._graphs[self._captured[bisect_left(self._captured, num_rows)]]
        graph.replay()
        return tokens if len(tokens) == num_rows else tokens[:num_rows]
