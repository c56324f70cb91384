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
from engine.batch.forward import ForwardBatch
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from kernels.sampling.early_rows import RowInputs


def early_columns(batch: ScheduleBatch, table: SlotTable) -> Sequence[HostColumn]:
    """Return the guesses of EarlyRows when a step is launched, int32 [num_rows, width]. Empty if no
    row may begin early."""
    early = batch.early
    if early is None:
        return ()
    if batch.mode is not ForwardMode.VERIFY:  # no row has drafts
        return (early[:, None],)
    earliest = batch.starts - early
    width = int(np.maximum.reduce(batch.ends - earliest))
    # One index in all tokens of the table. Entries after a row's last draft are not used.
    firsts = batch.slots.astype(np.intp) * table.context_length + earliest
    guesses = table.tokens.take(firsts[:, None] + np.arange(width), mode="clip")
    guesses[:, 0] = early
    return (guesses,)


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
