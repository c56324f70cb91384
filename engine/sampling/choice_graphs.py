"""Graphs of the end of a step: the model's head, sampling, and the tokens for the next step.

They serve steps whose tokens depend on hidden states and sampling parameters alone. Rows may be
greedy or not, because a greedy row has temperature 0. So there is one graph for each number of
rows, which steps of all kinds share.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kernels.sampling.sample import SamplingColumns

NUM_INPUTS = 1 + len(fields(SamplingColumns))

# Chooses the tokens of hidden states [n, hidden], and stores them for the next step as the last
# tokens of n slots (int64).
Choose: TypeAlias = Callable[[Tensor, SamplingColumns, Tensor], Tensor]


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


def choice_padding(num_rows: int, no_slot: int) -> list[Tensor]:
    """Return the inputs of greedy rows in host memory: their slots, then SamplingColumns.

    Args:
        no_slot: number of a slot that no request has.
    """
    columns = SamplingColumns(
        temperature=torch.zeros(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int32),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seeds=torch.zeros(num_rows, 2, dtype=torch.int32),
        positions=torch.zeros(num_rows, dtype=torch.int32),
    )
    return [torch.full((num_rows,), no_slot), *(getattr(columns, f.name) for f in fields(columns))]


class ChoiceGraphs:
    """Captures these graphs, and replays them. For use on the forward stream only.

    Args:
        record: see Recorder.
        hidden: the hidden states of the newest forward, [most rows or more, hidden].
        inputs: `choice_padding` of most rows, on the device. A step replaces the first entries.
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

    def capture(self, num_rows: int) -> None:
        """Capture the graph of a number of rows. Its memory is that of their logits."""
        if not self._possible:
            return
        hidden = self._hidden[:num_rows]
        slots, *columns = [each[:num_rows] for each in self._inputs]
        parameters = SamplingColumns(*columns)
        self._graphs[num_rows] = self._record(lambda: self._choose(hidden, parameters, slots))
        insort(self._captured, num_rows)

    def give_up(self) -> None:
        """Remove all graphs, and capture none."""
        self._possible = False
        self._graphs.clear()
        self._captured.clear()

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for so many rows."""
        return bool(self._captured) and num_rows <= self._captured[-1]

    def move(self, early: Tensor) -> None:
        """Subtract int32 [any] from the positions of the first rows."""
        self._inputs[-1][: len(early)].sub_(early)

    def replay(self, num_rows: int) -> Tensor:
        """Choose the tokens of the newest forward's first rows, int32 [num_rows]. Valid until the
        next `replay`."""
        graph, tokens = self._graphs[self._captured[bisect_left(self._captured, num_rows)]]
        graph.replay()
        return tokens[:num_rows]
