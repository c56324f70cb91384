"""Early rows: rows that begin at a position that depends on the drafts rejected in the previous
step.

A step is launched as if all previous drafts were accepted, because the CPU does not know the result
yet. On the forward stream the result is known, and each row is moved back by the number of rejected
drafts. A drafter's guess belongs to a token index. A moved row therefore computes the drafts of its
new indices.
"""

from collections.abc import Sequence

import numpy as np

from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import ForwardBatch, HostBatch
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from kernels.sampling.early_rows import RowInputs

_NO_GUESSES = np.empty((0, 0), np.int32)


def early_columns(batch: ScheduleBatch, rows: HostBatch, table: SlotTable) -> Sequence[HostColumn]:
    """Return `most` and `guesses` of EarlyRows when a step is launched. Empty if no row may begin
    early.

    Args:
        rows: the step.
    """
    most = batch.early
    if most is None:
        return ()
    if batch.mode is not ForwardMode.VERIFY:  # no row has drafts
        return most, _NO_GUESSES
    return most, table.guesses(rows.slots, batch.starts - most)


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
