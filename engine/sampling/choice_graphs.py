"""CUDA graphs of the end of a step: the model's head, sampling, the verification of drafts, and the
tokens for the next step.

They serve steps whose tokens depend only on hidden states and sampling parameters. All steps share
one graph per number of samples: a greedy row has temperature 0, and in a step without drafts, no
row is verified.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from engine.batch.upload import HostColumn
from kernels.sampling.sample import SamplingColumns
from kernels.sampling.verify import DraftRows

_PARAMETERS = fields(SamplingColumns)
NUM_PARAMETERS = len(_PARAMETERS)

# Chooses tokens from hidden states [n, hidden], and stores them for the next step as the last
# tokens of n slots (int64).
Choose: TypeAlias = Callable[[Tensor, SamplingColumns, Tensor], Tensor]

# Verifies drafts by the chosen tokens, and stores the newest tokens for the next step. The last
# argument becomes the result, see verify_drafts.
Verify: TypeAlias = Callable[[DraftRows, Tensor, Tensor], None]


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Repeat the work on the current stream: the same launches on the same addresses."""
        ...


class Recorder(Protocol):
    """Records the launches of a function as a graph. Runs the function once before the capture, so
    that nothing is compiled during the capture."""

    def __call__(self, work: Callable[[], Tensor], *, apart: bool = False) -> tuple[Graph, Tensor]:
        """Return the graph and the result of `work`. Every replay overwrites the result.

        Args:
            apart: the graph shares no memory with those recorded without `apart`. It may then be
                replayed between two of them, of which the second one reads a result of the first.
        Raises:
            Uncapturable: an operation of `work` cannot be part of a graph.
            RuntimeError: the capture failed.
        """
        ...


def choice_padding(num_rows: int, no_slot: int) -> list[HostColumn]:
    """Return the inputs of greedy rows in host memory: their slots, SamplingColumns, where the
    rows of a step with drafts start, and the number of rows, or 0 if none begins early or has
    drafts.

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
        np.zeros(num_rows + 1, np.int32),
        np.zeros(1, np.int32),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The verification of drafts in these graphs.

    Attributes:
        token_ids: int32 [any], the tokens of the newest step.
        verified: int32 [most rows, 2 + maximum tokens of a row]. Valid for the rows with drafts of
            the newest step.
    """

    verify: Verify
    token_ids: Tensor
    verified: Tensor


class ChoiceGraphs:
    """Captures and replays these graphs. For use on the forward stream only.

    Attributes:
        slots: the slots of the newest step's rows, then padding: int64 [most rows].
        parameters: sampling parameters of the newest step, then padding, [most rows].
        num_rows: int32 [1], rows of the newest step. 0 if no row begins early or has drafts.
        possible: whether graphs can contain this work.

    Args:
        hidden: hidden states of the newest forward, [most rows or more, hidden].
        inputs: `choice_padding` for the maximum number of rows, on the device. A step replaces the
            first entries.
        verification: None: no step has drafts.
    """

    def __init__(
        self,
        choose: Choose,
        record: Recorder,
        hidden: Tensor,
        inputs: Sequence[Tensor],
        verification: Verification | None = None,
    ) -> None:
        self._choose = choose
        self._record = record
        self._hidden = hidden
        self.slots, *parameters, self._starts, self.num_rows = inputs
        self.parameters = SamplingColumns(*parameters)
        self._verification = verification
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        self._captured: list[int] = []  # ascending
        self.possible = True

    def capture(self, num_rows: int) -> None:
        """Capture the graph for a number of rows. It needs memory for their logits."""
        if not self.possible:
            return
        hidden, slots = self._hidden[:num_rows], self.slots[:num_rows]
        columns = (getattr(self.parameters, each.name)[:num_rows] for each in _PARAMETERS)
        parameters = SamplingColumns(*columns)

        def work() -> Tensor:
            tokens = self._choose(hidden, parameters, slots)
            if (last := self._verification) is not None:
                rows = DraftRows(self._starts[: num_rows + 1], last.token_ids, slots, self.num_rows)
                last.verify(rows, tokens, last.verified[:num_rows])
            return tokens

        self._graphs[num_rows] = self._record(work, apart=True)
        insort(self._captured, num_rows)

    def give_up(self) -> None:
        """Remove all graphs, and capture no more."""
        self.possible = False
        self._graphs.clear()
        self._captured.clear()

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for this many rows."""
        return bool(self._captured) and num_rows <= self._captured[-1]

    def verified(self, num_rows: int) -> Tensor:
        """Return the first rows of Verification.verified after `replay`."""
        assert self._verification is not None
        return self._verification.verified[:num_rows]

    def replay(self, num_rows: int) -> Tensor:
        """Choose the tokens of the first rows of the newest forward: int32 [num_rows], valid until
        the next `replay`."""
        graph, tokens = self._graphs[self._captured[bisect_left(self._captured, num_rows)]]
        graph.replay()
        return tokens if len(tokens) == num_rows else tokens[:num_rows]
