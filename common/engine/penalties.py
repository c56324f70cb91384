"""Token counts for requests with penalties, kept on the device by slot.

With overlap the CPU lags one token behind, so that only the device can count the newest. A row of
counts is either made anew from the table or continued, and the rule needs no memory of who had the
slot before: where the CPU knows every token of a row, the counts are made anew; where it does not,
the missing token was sampled in this slot by the step before, which counted it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.batch import Ints
from common.engine.forward import upload
from common.engine.table import RequestTable
from kernels.penalties import apply_penalties, count_tokens


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyBatch:
    """The penalised rows of one step, in host memory.

    rows: int64 [m], places among the sampled rows; count_rows: int64 [m], their rows of counts.
    renewed: int64, the count rows made anew, from prompt and output: two columns, count row and
    token, int64 [2, n].
    capacity: count rows there must be.
    """

    rows: Tensor
    count_rows: Tensor
    repetition: Tensor  # float32 [m]
    frequency: Tensor
    presence: Tensor
    renewed: Tensor
    prompt: Tensor
    output: Tensor
    capacity: int


class PenaltyCounts:
    """Who has which row of counts (engine thread), and the counts (forward stream)."""

    def __init__(self, table: RequestTable, vocabulary_size: int, device: torch.device) -> None:
        self._table = table
        self._row_of = np.full(table.num_slots, -1, np.int64)
        self._num_rows = 0
        self._device = device
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
        return PenaltyBatch(
            rows=torch.from_numpy(rows),
            count_rows=torch.from_numpy(count_rows),
            repetition=torch.from_numpy(self._table.repetition_penalty[slots]),
            frequency=torch.from_numpy(self._table.frequency_penalty[slots]),
            presence=torch.from_numpy(self._table.presence_penalty[slots]),
            renewed=torch.from_numpy(count_rows[anew]),
            prompt=self._tokens(renewed, np.zeros_like(lengths), num_prompt),
            output=self._tokens(renewed, num_prompt, lengths),
            capacity=self._num_rows,
        )

    def apply(self, batch: PenaltyBatch, logits: Tensor) -> None:
        """On the forward stream, before sampling: brings counts up to date, penalises logits."""
        self._grow(batch.capacity)
        device = self._device
        if len(batch.renewed):
            self._counts.index_fill_(0, upload(batch.renewed, device), 0)
            for tokens, prompt in ((batch.prompt, True), (batch.output, False)):
                rows, ids = upload(tokens, device)
                count_tokens(self._counts, rows, ids, prompt=prompt)
        apply_penalties(
            logits,
            upload(batch.rows, device),
            self._counts,
            upload(batch.count_rows, device),
            repetition=upload(batch.repetition, device),
            frequency=upload(batch.frequency, device),
            presence=upload(batch.presence, device),
        )

    def add(self, batch: PenaltyBatch, tokens: Tensor) -> None:
        """On the forward stream, after sampling: counts the new tokens (of all sampled rows)."""
        taken = tokens[upload(batch.rows, self._device)]
        count_tokens(self._counts, upload(batch.count_rows, self._device), taken, prompt=False)

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

    def _tokens(self, slots: Ints, starts: Ints, ends: Ints) -> Tensor:
        counts = ends - starts
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        indices = np.arange(total) - np.repeat(offsets - starts, counts)
        owners = np.repeat(slots, counts)
        tokens = self._table.tokens[owners, indices].astype(np.int64)
        return torch.from_numpy(np.stack((self._row_of[owners], tokens)))

    def _grow(self, capacity: int) -> None:
        num_rows, vocabulary_size = self._counts.shape
        if capacity > num_rows:
            grown = self._counts.new_zeros(max(capacity, 2 * num_rows), vocabulary_size)
            grown[:num_rows] = self._counts
            self._counts = grown
