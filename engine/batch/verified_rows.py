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
    ) -> Tensor:
        """Compare drafts with samples. Runs on the forward stream with all tensors on the device.
        Return the number of new tokens of each row, and the tokens, as `verify_drafts` does: int32
        [num_rows, 2 + most].

        Args:
            batch: the computed step.
            sampled: int32 [num_tokens], the sampled tokens.
            newest, rejected: by slot, see `verify_drafts`.
        """
        rows = DraftRows(batch.query_starts, batch.token_ids, batch.slots, self.num_rows)
        verified = sampled.new_empty(len(batch.slots), 2 + self.most)
        verify_drafts(rows, sampled, newest, rejected, verified)
        return verified


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
