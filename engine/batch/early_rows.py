"""Rows that begin where drafts of the step before were rejected, which the CPU does not know yet.

A step is launched as if all drafts before it stood. The forward stream knows better by then, and
moves each row back by as many tokens as were rejected. What a drafter guesses is guessed for a
place: the drafts that the row then computes are those for its places, not those it had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import ForwardBatch
from engine.batch.table import RequestTable


@dataclass(frozen=True, slots=True, eq=False)
class EarlyRows:
    """Of one step. A row's drafts are in a window of what was guessed, from the first place that
    one of them may have."""

    most: Tensor  # int32 [num_rows]: so many tokens earlier, at most
    rows: Tensor  # int64 [num_tokens]: of each token
    tokens: Tensor  # int32 [num_tokens]: of its request, the index of each, if nothing is rejected
    guesses: Tensor  # int32 [any], window after window
    places: Tensor  # int64 [num_tokens]: of a draft in `guesses`, if nothing is rejected; else -1

    @classmethod
    def of(cls, batch: ScheduleBatch, table: RequestTable) -> Self | None:
        """At the launch of a step, in host memory; None where all rows begin where they say."""
        if batch.early is None:
            return None
        early, counts = batch.early, batch.ends - batch.starts
        rows, offsets = _ranges(counts)
        drafts = counts - 1 if batch.mode is ForwardMode.VERIFY else np.zeros_like(counts)
        widths = np.where(drafts > 0, early + drafts, 0)
        owners, indices = _ranges(widths)
        indices += (batch.starts - early + 1)[owners]
        firsts = np.cumsum(widths) - widths
        is_draft = (offsets > 0) & (drafts > 0)[rows]
        places = np.where(is_draft, (firsts + early - 1)[rows] + offsets, -1)
        return cls(
            torch.from_numpy(early),
            torch.from_numpy(rows),
            torch.from_numpy((batch.starts[rows] + offsets).astype(np.int32)),
            torch.from_numpy(table.tokens[batch.slots[owners], indices]),
            torch.from_numpy(places.astype(np.int64)),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def on_device(self, sent: Sequence[Tensor]) -> Self:
        """The same of its `tensors`, uploaded."""
        return type(self)(*sent)

    def moved(
        self, batch: ForwardBatch, rejected: Tensor, page_size: int
    ) -> tuple[ForwardBatch, Tensor]:
        """On the forward stream, with all on the device.

        Args:
            rejected: int32 [num_slots], by the step before.
        Returns:
            The step as it is to be computed, and by how much earlier each token is, int32
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


def _ranges(counts: NDArray[np.integer[Any]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """0 .. counts[i] - 1 for each i, one after the other: the i and the number of each."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
