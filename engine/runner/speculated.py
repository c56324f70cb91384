"""What a step needs besides where drafts are verified, or were in the step before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from engine.batch.batch import TO_GUESS, ScheduleBatch
from engine.batch.early_rows import EarlyRows
from engine.batch.forward import ForwardBatch
from engine.batch.table import RequestTable
from engine.batch.verified_rows import VerifiedRows


@dataclass(frozen=True, slots=True, eq=False)
class Speculated:
    """Of one step, in host memory. Of most steps there is nothing.

    to_guess: where the device guesses: rows with one draft at least, with two, and so on.
    """

    early: EarlyRows | None = None
    verified: VerifiedRows | None = None
    to_guess: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: ScheduleBatch, table: RequestTable) -> Self:
        """At the launch of a step."""
        early, verified = EarlyRows.of(batch, table), VerifiedRows.of(batch)
        return cls(early, verified, () if verified is None else _to_guess(batch, table))

    def __bool__(self) -> bool:
        return self.early is not None or self.verified is not None

    def tensors(self) -> list[Tensor]:
        parts = (self.early, self.verified)
        return [tensor for part in parts if part is not None for tensor in part.tensors()]

    def settled(
        self, batch: ForwardBatch, sent: Sequence[Tensor], rejected: Tensor, page_size: int
    ) -> "Settled":
        """On the forward stream, before the forward: its rows begin where they really do.

        Args:
            batch: on the device, as `sent` is: `tensors`.
            rejected: see FutureMap.
        """
        taken, early = 0, None
        if self.early is not None:
            taken = len(self.early.tensors())
            batch, early = self.early.on_device(sent[:taken]).moved(batch, rejected, page_size)
        verified = None if self.verified is None else self.verified.on_device(sent[taken:])
        return Settled(batch, early, verified)


NOTHING = Speculated()


def _to_guess(batch: ScheduleBatch, table: RequestTable) -> tuple[int, ...]:
    """A row's drafts are all the device's, or all known."""
    drafts = batch.ends - batch.starts - 1
    rows = drafts.nonzero()[0]
    first_drafts = table.tokens[batch.slots[rows], batch.starts[rows] + 1]
    if not np.count_nonzero(first_drafts == TO_GUESS):
        return ()
    return tuple(int(np.count_nonzero(drafts > n)) for n in range(int(drafts.max())))


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A step on the device.

    early: int32 [num_tokens], by how many places each comes earlier than was said; None: none does.
    """

    batch: ForwardBatch
    early: Tensor | None = None
    verified: VerifiedRows | None = None

    @property
    def num_chosen(self) -> int:
        """Of `sampled`, tokens after which one is chosen."""
        return len(self.batch.slots if self.verified is None else self.batch.token_ids)

    @property
    def early_chosen(self) -> Tensor | None:
        """`early` of those."""
        return None if self.early is None else self.early[self.batch.sampled[: self.num_chosen]]
