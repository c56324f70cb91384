"""One step as every rank computes it: all inputs of a forward without its requests, and the output.

Most steps have no drafts. A step that verifies drafts, or that follows such a step, has additional
inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.adapters.adapters import AdapterBatch
from engine.batch.batch import TO_GUESS, ForwardMode, PageCopies, ScheduleBatch
from engine.batch.early_rows import early_columns, row_inputs
from engine.batch.forward import ForwardBatch, HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from engine.batch.verified_rows import VerifiedRows, places_of
from engine.sampling.heads import SAMPLES, HeadInputs
from engine.sampling.pooling import Pooled
from kernels.sampling.early_rows import EarlyRows, move_early_rows


@dataclass(frozen=True, slots=True, eq=False)
class SpeculativeStep:
    """Speculation data of one step, in host memory. Empty for most steps.

    Attributes:
        early: `most` and `guesses` of EarlyRows. Empty: no row may begin early.
        most: maximum number of tokens of a row that are verified. 0: no row has drafts.
        places: VerifiedRows.places. Empty: the device draws no drafts.
        to_guess: if the device drafts: number of rows with at least one draft, with at least two,
            and so on.
    """

    early: Sequence[HostColumn] = ()
    most: int = 0
    places: Sequence[HostColumn] = ()
    to_guess: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: ScheduleBatch, table: SlotTable, rows: HostBatch) -> "SpeculativeStep":
        """Return the data when a step is launched. `rows`: the step."""
        if batch.early is None and batch.mode is not ForwardMode.VERIFY:
            return NOTHING  # the case of most steps
        early, most = early_columns(batch, rows, table), 0
        if batch.mode is ForwardMode.VERIFY:  # the first row has the most tokens
            most = rows.extends[0][0]
        to_guess = _to_guess(batch, rows.token_ids) if most else ()
        return cls(early, most, (places_of(batch),) if to_guess else (), to_guess)

    def columns(self, num_rows: int) -> Sequence[HostColumn]:
        """Return the columns to upload for a step with `num_rows` rows."""
        if not (self.early or self.most):
            return ()
        return (np.array((num_rows,), np.int32), *self.early, *self.places)

    def settled(
        self, batch: ForwardBatch, sent: Sequence[Tensor], rejected: Tensor, page_size: int
    ) -> "SettledDrafts":
        """Return the step with the real starts of its rows. On the forward stream, before the
        forward.

        Args:
            batch: on the device. Changed in place.
            sent: `columns` on the device.
            rejected: see FutureMap.
        """
        early = verified = None
        if self.most:
            verified = VerifiedRows(self.most, sent[0], *sent[1 + len(self.early) :])
        if self.early:
            num_rows, most, guesses = sent[:3]
            early = most.new_zeros(len(most) if verified is None else len(batch.token_ids))
            rows = EarlyRows(most, guesses, batch.query_starts, batch.slots, num_rows)
            move_early_rows(rows, row_inputs(batch), rejected, early, page_size)
            early.neg_()
        return SettledDrafts(batch, early, verified)


NOTHING = SpeculativeStep()


class Step(msgspec.Struct, frozen=True, eq=False):
    """A step in host memory. Immutable.

    Attributes:
        rows: None: the step has only copies.
        graph: shape of the captured graph that computes the forward. None: no graph does.
        swap_out: before the forward, pool -> host.
        swap_in: before the forward and after swap_out, host -> pool.
    """

    rows: HostBatch | None = None
    speculated: SpeculativeStep = NOTHING
    adapters: AdapterBatch | None = None
    heads: HeadInputs = SAMPLES
    graph: GraphShape | None = None
    swap_out: PageCopies | None = None
    swap_in: PageCopies | None = None

    @property
    def adapter_columns(self) -> Sequence[HostColumn]:
        return () if self.adapters is None else self.adapters.columns()


@dataclass(frozen=True, slots=True, eq=False)
class SettledDrafts:
    """A step on the device, with the real positions of its rows.

    Attributes:
        early: int32, see HiddenStates.
    """

    batch: ForwardBatch
    early: Tensor | None = None
    verified: VerifiedRows | None = None

    @property
    def num_chosen(self) -> int:
        """Number of tokens in `sampled` after which a token is sampled."""
        return len(self.batch.slots if self.verified is None else self.batch.token_ids)


_NO_TOKENS = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True, eq=False)
class StepOutput:
    """The result of a step, in host memory. Written by the forward stream. Valid after its event.

    Attributes:
        logprobs, prompt: columns of RowLogprobRequest, of samples and of prompts.
        pooled: vectors of the rows that generate no token.
        verified: columns of VerifiedDrafts, in place of `tokens`. None: no row had drafts.
    """

    tokens: Tensor = _NO_TOKENS
    logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Pooled = ()
    verified: Tensor | None = None


def _to_guess(batch: ScheduleBatch, token_ids: HostColumn) -> tuple[int, ...]:
    """Return the counts of `to_guess`."""
    if np.minimum.reduce(token_ids) != TO_GUESS:  # the smallest number
        return ()
    drafts = batch.ends - batch.starts - 1
    return tuple(int(np.count_nonzero(drafts > n)) for n in range(int(drafts.max())))
