"""Early rows: rows that begin at a position that depends on the drafts rejected in the previous
step.

A step is launched as if all previous drafts were accepted, because the CPU does not know the result
yet. On the forward stream the result is known, and each row is moved back by the number of rejected
drafts. A drafter's guess belongs to a token index. A moved row therefore computes the drafts of its
new indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import ForwardBatch
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn


@dataclass(frozen=True, slots=True, eq=False)
class PrestagedRows:
    """The early rows of one step, on the device. Each row's drafts are in a window of the guesses.
    The window begins at the first index that one of its drafts may have."""

    most: Tensor  # int32 [num_rows]: maximum number of tokens by which the row moves back
    rows: Tensor  # int64 [num_tokens]: row of each token
    # int32 [num_tokens]: index of each token in its request, if no draft is rejected.
    tokens: Tensor
    guesses: Tensor  # int32 [any], all windows concatenated
    # int64 [num_tokens]: index of a draft in `guesses`, if no draft is rejected. -1: no draft.
    places: Tensor

    def moved(
        self, batch: ForwardBatch, rejected: Tensor, page_size: int
    ) -> tuple[ForwardBatch, Tensor]:
        """Move the rows of a step back. Runs on the forward stream with all tensors on the device.

        Args:
            rejected: int32 [num_slots], number of rejected drafts, written by the previous step.
        Returns:
            The step to compute, and the distance by which each token was moved back, int32
                [num_tokens].
        """
        by_row = torch.minimum(rejected[batch.slots], self.most)
        by_token = by_row[self.rows]
        positions, indices = batch.positions - by_token, self.tokens - by_token
        token_ids = batch.token_ids
        if len(self.guesses):
            guesses = self.guesses[(self.places - by_token).clamp_(min=0)]
            token_ids = torch.where(self.places < 0, token_ids, guesses)
        pages, offsets = indices // page_size, indices % page_size
        locations = tuple(
            torch.where(
                by_token > 0,
                batch.page_ids[page_starts[self.rows] + pages].long() * page_size + offsets,
                where,
            )
            for where, page_starts in zip(batch.locations, batch.page_starts, strict=True)
        )
        return (
            replace(
                batch,
                token_ids=token_ids,
                positions=positions,
                locations=locations,
                lengths=batch.lengths - by_row,
            ),
            by_token,
        )


def early_columns(batch: ScheduleBatch, table: SlotTable) -> Sequence[HostColumn]:
    """Return the columns of PrestagedRows when a step is launched. Empty if no row may begin
    early."""
    if batch.early is None:
        return ()
    early, counts = batch.early, batch.ends - batch.starts
    rows, offsets = _ranges(counts)
    drafts = counts - 1 if batch.mode is ForwardMode.VERIFY else np.zeros_like(counts)
    widths = np.where(drafts > 0, early + drafts, 0)
    owners, indices = _ranges(widths)
    indices += (batch.starts - early + 1)[owners]
    firsts = np.cumsum(widths) - widths
    is_draft = (offsets > 0) & (drafts > 0)[rows]
    places = np.where(is_draft, (firsts + early - 1)[rows] + offsets, -1)
    return (
        early,
        rows,
        (batch.starts[rows] + offsets).astype(np.int32),
        table.tokens[batch.slots[owners], indices],
        places.astype(np.int64),
    )


def _ranges(counts: NDArray[np.integer[Any]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Concatenate the ranges 0 .. counts[i] - 1 for all i. Return i and the number for each
    entry."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
