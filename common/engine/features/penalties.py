"""Token counts for requests with penalties, kept on the device by slot.

With overlap the CPU lags one token behind, so that only the device can count the newest. A row of
counts is either made anew from the table or continued, and the rule needs no memory of who had the
slot before: where the CPU knows every token of a row, the counts are made anew; where it does not,
the missing token was sampled in this slot by the step before, which counted it.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.rows.batch import Ints
from common.engine.rows.table import RequestTable
from common.engine.rows.upload import upload
from kernels.penalties import apply_penalties, count_tokens


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyBatch:
    """The penalised rows of one step.

    rows: int64 [m], places among the sampled rows; count_rows: int64 [m], their rows of counts.
    renewed: int64, the count rows made anew: from prompt and output, token by token, each with its
    count row, int64 [n].
    capacity: count rows there must be.
    """

    rows: Tensor
    count_rows: Tensor
    repetition: Tensor  # float32 [m]
    frequency: Tensor
    presence: Tensor
    renewed: Tensor
    prompt_rows: Tensor
    prompt_tokens: Tensor
    output_rows: Tensor
    output_tokens: Tensor
    capacity: int

    def to(self, device: torch.device) -> "PenaltyBatch":
        """The batch on the device, see `upload`."""
        uploaded = upload([getattr(self, name) for name in _TENSORS], device)
        return PenaltyBatch(**dict(zip(_TENSORS, uploaded, strict=True)), capacity=self.capacity)


_TENSORS = tuple(f.name for f in fields(PenaltyBatch) if f.name != "capacity")


class PenaltyCounts:
    """Who has which row of counts (engine thread), and the counts (forward stream)."""

    def __init__(self, table: RequestTable, vocabulary_size: int, device: torch.device) -> None:
        self._table = table
        self._row_of = np.full(table.num_slots, -1, np.int64)
        self._num_rows = 0
        self._counts = torch.zeros(0, vocabulary_size, dtype=torch.int32, device=device)

    def build(self, slots: Ints, positions: Ints) -> PenaltyBatch | None:
        """On the engine thread, at launch; None where no row is penalised.

        Args:
            slots: of the rows that sample.
            positions: absolute index of the token that each will sample.
        """
        rows = self._table.penalised[slots].nonzero()[0]
        if not len(rows):
            return None
        slots, positions = slots[rows], positions[rows]
        count_rows = self._rows_for(slots)
        anew = self._table.known[slots] >= positions
        renewed, lengths = slots[anew], positions[anew]
        num_prompt = np.minimum(self._table.num_prompt[renewed], lengths)
        prompt_rows, prompt_tokens = self._tokens(renewed, np.zeros_like(lengths), num_prompt)
        output_rows, output_tokens = self._tokens(renewed, num_prompt, lengths)
        return PenaltyBatch(
            rows=torch.from_numpy(rows),
            count_rows=torch.from_numpy(count_rows),
            repetition=torch.from_numpy(self._table.repetition_penalty[slots]),
            frequency=torch.from_numpy(self._table.frequency_penalty[slots]),
            presence=torch.from_numpy(self._table.presence_penalty[slots]),
            renewed=torch.from_numpy(count_rows[anew]),
            prompt_rows=prompt_rows,
            prompt_tokens=prompt_tokens,
            output_rows=output_rows,
            output_tokens=output_tokens,
            capacity=self._num_rows,
        )

    def rehearsal(self) -> PenaltyBatch:
        """Of nobody's tokens, in the first row of counts: it is made anew for its first owner."""
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        return PenaltyBatch(
            rows=zero,
            count_rows=zero,
            repetition=one,
            frequency=one,
            presence=one,
            renewed=zero,
            prompt_rows=zero,
            prompt_tokens=zero,
            output_rows=zero,
            output_tokens=zero,
            capacity=1,
        )

    def apply(self, batch: PenaltyBatch, logits: Tensor) -> None:
        """On the forward stream, before sampling: brings counts up to date, penalises logits.

        Args:
            batch: on the device.
            logits: float32 [n, vocabulary].
        """
        self._grow(batch.capacity)
        if len(batch.renewed):
            self._counts.index_fill_(0, batch.renewed, 0)
            count_tokens(self._counts, batch.prompt_rows, batch.prompt_tokens, prompt=True)
            count_tokens(self._counts, batch.output_rows, batch.output_tokens, prompt=False)
        apply_penalties(
            logits,
            batch.rows,
            self._counts,
            batch.count_rows,
            repetition=batch.repetition,
            frequency=batch.frequency,
            presence=batch.presence,
        )

    def add(self, batch: PenaltyBatch, tokens: Tensor) -> None:
        """On the forward stream, after sampling: counts the new tokens (of all sampled rows)."""
        count_tokens(self._counts, batch.count_rows, tokens[batch.rows], prompt=False)

    def _rows_for(self, slots: Ints) -> NDArray[np.int64]:
        missing = slots[self._row_of[slots] < 0]
        if len(missing):
            # A slot whose request is not penalised needs its row no longer. A launched step that
            # still uses it comes before this one on the stream.
            idle = ((self._row_of >= 0) & ~self._table.penalised).nonzero()[0][: len(missing)]
            rows = self._row_of[idle]
            self._row_of[idle] = -1
            added = np.arange(self._num_rows, self._num_rows + len(missing) - len(idle))
            self._num_rows += len(added)
            self._row_of[missing] = np.concatenate((rows, added))
        return self._row_of[slots]

    def _tokens(self, slots: Ints, starts: Ints, ends: Ints) -> tuple[Tensor, Tensor]:
        """Token indices [starts, ends) of the slots: their rows of counts, and their tokens."""
        counts = ends - starts
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        indices = np.arange(total) - np.repeat(offsets - starts, counts)
        owners = np.repeat(slots, counts)
        tokens = self._table.tokens[owners, indices].astype(np.int64)
        return torch.from_numpy(self._row_of[owners]), torch.from_numpy(tokens)

    def _grow(self, capacity: int) -> None:
        num_rows, vocabulary_size = self._counts.shape
        if capacity > num_rows:
            grown = self._counts.new_zeros(max(capacity, 2 * num_rows), vocabulary_size)
            grown[:num_rows] = self._counts
            self._counts = grown
