"""Verification of drafts in a VERIFY step, on the forward stream, where the next step needs the
result.

A token is sampled after each token of a row, see kernels/sampling/verify. The sample after the last
accepted draft is the request's next token, however the drafts were made.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import AcceptedRuns, ScheduleBatch
from engine.batch.forward import ForwardBatch
from kernels.sampling.verify import DraftRows, verify_drafts


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedDrafts:
    """The tokens of a VERIFY step after verification.

    Attributes:
        columns: int32 [num_rows, 2 + most tokens of a row, or more], see `verify_drafts`.
    """

    columns: Tensor

    @property
    def counts(self) -> Tensor:
        """Number of new tokens of each row, int32 [num_rows]."""
        return self.columns[:, 0].contiguous()

    def last_places(self, batch: ForwardBatch) -> Tensor:
        """Return the place of each row's last accepted token among the step's tokens, int64
        [num_rows]."""
        return (batch.query_starts[:-1] + self.counts).long() - 1


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRows:
    """The rows of one step to verify, on the device.

    The step's samples begin with one after each row's last token. The others follow, row by row
    (ForwardBatch.sampled).

    Attributes:
        most: maximum number of tokens of a row.
        num_rows: int32 [1].
    """

    most: int
    num_rows: Tensor

    def verify(
        self, batch: ForwardBatch, sampled: Tensor, newest: Tensor, rejected: Tensor
    ) -> VerifiedDrafts:
        """Compare drafts with samples. Runs on the forward stream with all tensors on the device.

        Args:
            batch: the computed step.
            sampled: int32 [num_tokens], the sampled tokens.
            newest, rejected: by slot, see `verify_drafts`.
        """
        rows = DraftRows(batch.query_starts, batch.token_ids, batch.slots, self.num_rows)
        verified = sampled.new_empty(len(batch.slots), 2 + self.most)
        verify_drafts(rows, sampled, newest, rejected, verified)
        return VerifiedDrafts(verified)


def runs_of(columns: NDArray[np.int32]) -> AcceptedRuns:
    """Return the new tokens of rows, from `VerifiedDrafts.columns` in host memory."""
    return AcceptedRuns(columns[:, 2:], columns[:, 0])


def standing(
    batch: ScheduleBatch, runs: AcceptedRuns
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the row of each accepted token, row by row, and its index among the samples."""
    samples = _samples((batch.ends - batch.starts).astype(np.int64))
    rows, numbers = np.nonzero(np.arange(samples.shape[1]) < runs.counts[:, None])
    return rows, samples[rows, numbers]


def _samples(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the sample after each token of rows with these token counts, int64
    [num_rows, most]."""
    firsts = np.cumsum(counts) - counts
    each, rows = np.arange(counts.max()), np.arange(len(counts))[:, None]
    others = len(counts) + (firsts[:, None] - rows) + each  # each earlier row has one sample less
    return np.where(each < counts[:, None] - 1, others, rows)
