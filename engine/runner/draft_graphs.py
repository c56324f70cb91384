"""CUDA graphs of a drafter: the device draws the drafts of a step one by one, without the host.

A drafter computes one token of each row, draws the draft that follows it, and continues with that.
The host only knows how many drafts the longest row has. The graphs read everything else from the
inputs of the step, and count the drafts in memory of the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.models.drafting import has_draft, live_token, sample_places
from engine.sampling.choice_graphs import Graph
from kernels.sampling.sample import SamplingColumns, sample


class GraphDrafter:
    """The work of these graphs, for the steps of all shapes.

    In its methods, `num_rows` is int32 [1], the rows of a step without padding.

    Args:
        before: returns the vectors before each row's first token, see DeviceDrafter.
        advance: computes one token of each row, from the vectors before it.
        logits: returns the logits of vectors.
    """

    def __init__(
        self,
        before: Callable[[ForwardBatch], Tensor],
        advance: Callable[[ForwardBatch, Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self._before = before
        self._advance = advance
        self._logits = logits
        self._allocated: tuple[Tensor, Tensor] | None = None

    def allocate(self, batch: ForwardBatch, max_rows: int) -> None:
        """Allocate memory for the results, unless that is done.

        Args:
            batch: any batch on the device. It determines the size of a vector.
        """
        if self._allocated is None:
            like = self._before(batch)
            vectors = like.new_zeros(max_rows, like.shape[1])
            self._allocated = vectors, torch.zeros(1, dtype=torch.int64, device=like.device)

    @property
    def vectors(self) -> Tensor:
        """Vectors before the next tokens, [most rows, hidden]."""
        assert self._allocated is not None
        return self._allocated[0]

    @property
    def _number(self) -> Tensor:
        """Number of the next token in its row: int64 [1]."""
        assert self._allocated is not None
        return self._allocated[1]

    def begin(self, batch: ForwardBatch, num_rows: Tensor) -> Tensor:
        """Continue with the first token of each row. Rows without drafts have vectors of zeros,
        because theirs may be undefined."""
        drafted = has_draft(batch, self._number.zero_(), num_rows)
        before = torch.where(drafted[:, None], self._before(batch), 0)
        return self.vectors[: batch.num_rows].copy_(before)

    def advance(self, batch: ForwardBatch, num_rows: Tensor) -> Tensor:
        """Compute the next token of each row that has a draft after it, and replace the vectors."""
        one, vectors = live_token(batch, self._number, num_rows), self.vectors[: batch.num_rows]
        self._number.add_(1)
        return vectors.copy_(self._advance(one, vectors))

    def draw(self, batch: ForwardBatch, num_rows: Tensor, columns: SamplingColumns) -> Tensor:
        """Draw the draft of each row after the token of `advance`, in place of TO_GUESS.

        Args:
            columns: sampling parameters of the samples of the step, then padding.
        """
        token_ids, number = batch.token_ids, self._number
        most = min(batch.num_rows, len(columns.positions))
        rows = torch.arange(most, device=number.device)
        live = has_draft(batch, number - 1, num_rows)[:most]
        samples = torch.where(live, sample_places(batch, rows, num_rows, number - 1), rows)
        drafts = sample(self._logits(self.vectors[:most]), columns.at(samples)).clamp_(min=0)
        # The last token belongs to padding. It does not change.
        places = torch.where(live, batch.query_starts[:most] + number, len(token_ids) - 1)
        before = token_ids[places]
        token_ids[places] = torch.where(live & (before == TO_GUESS), drafts, before)
        return self.vectors[:most]


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraphs:
    """The captured work of a GraphDrafter for one shape.

    Attributes:
        draw: None: tokens are not chosen by graphs.
    """

    begin: Graph
    advance: Graph
    draw: Graph | None

    def replay(self, num_drafts: int) -> None:
        """Draw the drafts of a step.

        Args:
            num_drafts: maximum number of a row. 0: the host knows all drafts.
        """
        self.begin.replay()
        for _ in range(num_drafts):
            assert self.draw is not None
            self.advance.replay()
            self.draw.replay()


@dataclass(frozen=True, slots=True, eq=False)
class GraphDrafts:
    """Forwards of a drafter within a step, see DraftSteps. The drafts are drawn without graphs.

    Attributes:
        token_ids: the step's inputs of the graphs.
        vectors_of_rows: GraphDrafter.vectors.
    """

    token_ids: Tensor
    graphs: DraftGraphs
    vectors_of_rows: Tensor

    def vectors(self, number: int, num_rows: int) -> Tensor:
        self.graphs.advance.replay()
        return self.vectors_of_rows[:num_rows]
