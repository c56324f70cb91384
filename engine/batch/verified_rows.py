"""Which drafts of a VERIFY step stand: on the forward stream, which needs to know at once.

A token is sampled after each token of a row. A draft stands if it is what was sampled in its place,
and so do all before it: then the next sample is the request's own, whatever drew it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import ForwardMode, Runs, ScheduleBatch


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """tokens int32 [num_rows, most tokens of a row], the first counts[i] of row i are its new ones;
    newest, rejected: int32 [num_rows], the last of those, and the drafts that did not stand; last:
    int64 [num_rows], the place of the last token that stands among the step's samples."""

    tokens: Tensor
    counts: Tensor
    newest: Tensor
    rejected: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRows:
    """Of one step. Its samples are those after each row's last token, then the others, row after
    row (ForwardBatch.sampled)."""

    counts: Tensor  # int32 [num_rows], tokens
    samples: Tensor  # int64 [num_rows, most]: of each token, the place of what is sampled after it
    drafts: Tensor  # int64 [num_rows, most - 1]: the draft behind each, among the tokens; else -1

    @classmethod
    def of(cls, batch: ScheduleBatch) -> Self | None:
        """At the launch of a step, in host memory; None where no row has drafts."""
        if batch.mode is not ForwardMode.VERIFY:
            return None
        counts = (batch.ends - batch.starts).astype(np.int64)
        firsts, each = np.cumsum(counts) - counts, np.arange(counts.max())
        drafts = np.where(each[1:] < counts[:, None], firsts[:, None] + each[1:], -1)
        return cls(
            torch.from_numpy(counts.astype(np.int32)),
            torch.from_numpy(_samples(counts)),
            torch.from_numpy(drafts),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def on_device(self, sent: Sequence[Tensor]) -> Self:
        """The same of its `tensors`, uploaded."""
        return type(self)(*sent)

    def judge(self, token_ids: Tensor, sampled: Tensor) -> Verified:
        """On the forward stream, with all on the device.

        Args:
            token_ids: int32 [num_tokens], what was computed.
            sampled: int32 [num_tokens].
        """
        tokens = sampled[self.samples]
        drafts = token_ids[self.drafts.clamp(min=0)]
        stand = (drafts == tokens[:, :-1]) & (self.drafts >= 0)
        accepted = stand.int().cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
        ends = accepted[:, None].long()
        newest, last = tokens.gather(1, ends).squeeze(1), self.samples.gather(1, ends).squeeze(1)
        return Verified(tokens, accepted + 1, newest, self.counts - 1 - accepted, last)


def standing(batch: ScheduleBatch, runs: Runs) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Of each token that the rows have got, row after row: its row, and its place among the
    samples."""
    samples = _samples((batch.ends - batch.starts).astype(np.int64))
    rows, numbers = np.nonzero(np.arange(samples.shape[1]) < runs.counts[:, None])
    return rows, samples[rows, numbers]


def _samples(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """As of VerifiedRows, of rows of so many tokens."""
    firsts = np.cumsum(counts) - counts
    each, rows = np.arange(counts.max()), np.arange(len(counts))[:, None]
    others = len(counts) + (firsts[:, None] - rows) + each  # a row before has one sample less
    return np.where(each < counts[:, None] - 1, others, rows)
