"""One step as every rank computes it: all inputs of a forward without its requests, and the output.

Most steps have no drafts. A step that verifies drafts, or that follows such a step, has additional
inputs. The latter is launched as if all previous drafts were accepted, because the CPU does not
know the result yet. On the forward stream the result is known, and each row is moved back by the
number of rejected drafts (early rows). A drafter's guess belongs to a token index. A moved row
therefore computes the drafts of its new indices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.adapters.adapters import AdapterBatch
from engine.batch.batch import TO_GUESS, ForwardMode, PageCopies, ScheduleBatch
from engine.batch.forward import ForwardBatch, HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from engine.batch.verified_rows import VerifiedRows
from engine.sampling.heads import SAMPLES, HeadInputs
from engine.sampling.pooling import Pooled
from kernels.sampling.early_rows import EarlyRows, RowInputs, move_early_rows

_NO_GUESSES = np.empty((0, 0), np.int32)


def row_inputs(batch: ForwardBatch) -> RowInputs:
    """Return the inputs that move with early rows."""
    return RowInputs(
        batch.token_ids,
        batch.positions,
        batch.lengths,
        batch.locations,
        batch.page_starts,
        batch.page_ids,
    )


class SpeculativeStep(msgspec.Struct, frozen=True, eq=False):
    """Speculation data of one step, in host memory. Empty for most steps.

    Attributes:
        early: `most` and `guesses` of EarlyRows. Empty: no row may begin early.
        most: maximum number of tokens of a row that are verified. 0: no row has drafts.
        num_guessed: maximum number of drafts of a row, if the device draws some of them.
    """

    early: Sequence[HostColumn] = ()
    most: int = 0
    num_guessed: int = 0

    @classmethod
    def of(cls, batch: ScheduleBatch, table: SlotTable, rows: HostBatch) -> "SpeculativeStep":
        """Return the data when a step is launched. `rows`: the step."""
        if batch.early is None and batch.mode is not ForwardMode.VERIFY:
            return NOTHING  # the case of most steps
        early: Sequence[HostColumn] = ()
        most = num_guessed = 0
        if batch.early is not None:
            early = batch.early, _NO_GUESSES  # no row has drafts
        if batch.mode is ForwardMode.VERIFY:
            if batch.early is not None:
                early = batch.early, table.guesses(rows.slots, batch.starts - batch.early)
            most = rows.extends[0][0]  # the first row has the most tokens
            if np.minimum.reduce(rows.token_ids) == TO_GUESS:  # the smallest number
                num_guessed = most - 1
        return cls(early, most, num_guessed)

    def columns(self, num_rows: int) -> Sequence[HostColumn]:
        """Return the columns to upload for a step with `num_rows` rows."""
        if not (self.early or self.most):
            return ()
        return (np.array((num_rows,), np.int32), *self.early)

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
        early, verified = None, VerifiedRows(self.most, sent[0]) if self.most else None
        if self.early:
            num_rows, most, guesses = sent
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
        verified: see VerifiedRows.verify, in place of `tokens`. None: no row had drafts.
    """

    tokens: Tensor = _NO_TOKENS
    logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Pooled = ()
    verified: Tensor | None = None
