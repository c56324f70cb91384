"""Verification of drafts in a VERIFY step, on the forward stream, where the next step needs the
result.

A token is sampled after each token of a row. A draft is accepted if it equals the token sampled at
its index and all drafts before it are accepted. The next sample is then the request's own token,
however the draft was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import AcceptedRuns, ForwardMode, ScheduleBatch
from engine.batch.upload import HostColumn


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedDrafts:
    """The tokens of a VERIFY step after verification.

    tokens: int32 [num_rows, most tokens of a row]. The first counts[i] of row i are new. newest,
    rejected: int32 [num_rows], the last new token and the number of rejected drafts. last: int64
    [num_rows], the index of the last accepted token among the step's samples.
    """

    tokens: Tensor
    counts: Tensor
    newest: Tensor
    rejected: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRows:
    """The rows of one step to verify, on the device.

    The step's samples begin with one after each row's last token. The others follow, row by row
    (ForwardBatch.sampled).
    """

    counts: Tensor  # int32 [num_rows], number of tokens
    samples: Tensor  # int64 [num_rows, most]: index of the sample after each token
    drafts: Tensor  # int64 [num_rows, most - 1]: index of the draft after each token, or -1

    def judge(self, token_ids: Tensor, sampled: Tensor) -> VerifiedDrafts:
        """Compare drafts with samples. Runs on the forward stream with all tensors on the device.

        Args:
            token_ids: int32 [num_tokens], the computed tokens.
            sampled: int32 [num_tokens], the sampled tokens.
        """
        tokens = sampled[self.samples]
        drafts = token_ids[self.drafts.clamp(min=0)]
        stand = (drafts == tokens[:, :-1]) & (self.drafts >= 0)
        accepted = stand.int().cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
        ends = accepted[:, None].long()
        newest, last = tokens.gather(1, ends).squeeze(1), self.samples.gather(1, ends).squeeze(1)
        return VerifiedDrafts(tokens, accepted + 1, newest, self.counts - 1 - accepted, last)


def verified_columns(batch: ScheduleBatch) -> Sequence[HostColumn]:
    """Return the columns of VerifiedRows when a step is launched. Empty if no row has drafts."""
    if batch.mode is not ForwardMode.VERIFY:
        return ()
    counts = (batch.ends - batch.starts).astype(np.int64)
    firsts, each = np.cumsum(counts) - counts, np.arange(counts.max())
    drafts = np.where(each[1:] < counts[:, None], firsts[:, None] + each[1:], -1)
    return counts.astype(np.int32), _samples(counts), drafts


def standing(
    batch: ScheduleBatch, runs: AcceptedRuns
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the row of each accepted token, row by row, and its index among the samples."""
    samples = _samples((batch.ends - batch.starts).astype(np.int64))
    rows, numbers = np.nonzero(np.arange(samples.shape[1]) < runs.counts[:, None])
    return rows, samples[rows, numbers]


def _samples(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `VerifiedRows.samples` for rows with these token counts."""
    firsts = np.cumsum(counts) - counts
    each, rows = np.arange(counts.max()), np.arange(len(counts))[:, None]
    others = len(counts) + (firsts[:, None] - rows) + each  # each earlier row has one sample less
    return np.where(each < counts[:, None] - 1, others, rows)
