"""The computation of a simulated device: witnesses of pages in, tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.page_tables import PageTables
from engine.batch.batch import (
    NOT_SAMPLED,
    TO_GUESS,
    AcceptedRuns,
    BatchResult,
    ForwardMode,
    Ints,
    ScheduleBatch,
    StateCheckpoint,
)
from engine.batch.table import SlotTable
from simulation.device.witness import (
    Words,
    first_page,
    is_accepted,
    place_weights,
    state_token_weights,
    state_weights,
    token_weights,
    tokens_of,
)

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, copied at the launch. All arrays except `tokens` are by row.

    Attributes:
        starts, ends: positions of the first token and after the last one, unless the row is moved.
        early: positions by which the device may move the row back, see ScheduleBatch.
        known: number of tokens that the table had. The next one is the last token sampled in the
            slot.
        tokens: tokens of all rows, each from the first position that it may have.
        offsets: index of position 0 of each row in `tokens`, which may be negative.
        pages: [rows, tables, most pages of a row].
        state: [rows, state pages].
    """

    slots: _Places
    starts: _Places
    ends: _Places
    early: _Places
    known: _Places
    tokens: Ints
    offsets: _Places
    pages: Ints
    state: Ints


class SimDevice:
    """The memory of a simulated device, and its state of each slot.

    Args:
        pool, host_pool: witnesses of all pages.
        draft_acceptance: probability that a draft of the device is right.
    """

    def __init__(
        self, table: SlotTable, pool: Words, host_pool: Words, draft_acceptance: float = 0.0
    ) -> None:
        self._table = table
        self._tables: PageTables = table.tables
        self._pool = pool
        self._host_pool = host_pool
        self._draft_acceptance = draft_acceptance
        self._newest = np.zeros(table.num_slots, np.int32)  # the last token sampled in each slot
        self._rejected = np.zeros(table.num_slots, np.intp)  # drafts of each slot's last step
        self._token_weights = token_weights(table.page_size, self._tables.num_tables)
        self._place_weights = place_weights(table.page_table.shape[2])
        self._state_weights = state_weights(self._tables.state_pages)

    def rows_of(self, batch: ScheduleBatch) -> StepRows:
        """Copy the parts of the table that a step needs."""
        table = self._table
        slots, starts, ends = (
            each.astype(np.intp) for each in (batch.slots, batch.starts, batch.ends)
        )
        early = np.zeros_like(starts) if batch.early is None else batch.early.astype(np.intp)
        rows, places = _places(starts - early, ends)
        counts = ends - starts + early
        most_pages = int(-(-ends.max(initial=0) // table.page_size))
        return StepRows(
            slots,
            starts,
            ends,
            early,
            table.known[slots].astype(np.intp),
            table.tokens[slots[rows], places],
            np.cumsum(counts) - ends,
            table.page_table[slots, :, :most_pages],
            table.state[slots],
        )

    def compute(self, batch: ScheduleBatch, step: StepRows) -> BatchResult:
        """Execute a step. Called in the order of launches."""
        self._copy(batch)
        if not len(step.slots):
            return BatchResult(np.empty(0, np.int32))
        moved = np.minimum(self._rejected[step.slots], step.early)
        starts, ends = step.starts - moved, step.ends - moved
        if batch.mode is ForwardMode.VERIFY:
            return self._verified(step, starts, ends)
        self._rejected[step.slots] = 0
        self._resume(batch, step)
        rows = np.arange(len(step.slots))
        self._write(step, rows, starts, ends, batch.kept)
        sampled, _ = self._sampled(step, rows, ends)
        return BatchResult(np.where(batch.samples, sampled, NOT_SAMPLED).astype(np.int32))

    def _verified(self, step: StepRows, starts: _Places, ends: _Places) -> BatchResult:
        """Compute tokens one by one in each row, up to the first wrong draft."""
        most = int((ends - starts).max())
        runs = np.full((len(starts), most), NOT_SAMPLED, np.int32)
        counts = np.zeros(len(starts), np.int32)
        rows = np.arange(len(starts))
        for number in range(most):
            places = starts[rows] + number
            self._write(step, rows, places, places + 1)
            sampled, guesses_right = self._sampled(step, rows, places + 1)
            runs[rows, number] = sampled
            counts[rows] += 1
            is_drafted = places + 1 < ends[rows]
            rows, places = rows[is_drafted], places[is_drafted]
            drafts = step.tokens[step.offsets[rows] + places + 1]
            is_right = drafts == sampled[is_drafted]
            rows = rows[np.where(drafts == TO_GUESS, guesses_right[is_drafted], is_right)]
            if not len(rows):
                break
        self._rejected[step.slots] = ends - starts - counts
        return BatchResult(self._newest[step.slots], runs=AcceptedRuns(runs, counts))

    def _write(
        self,
        step: StepRows,
        rows: _Places,
        starts: _Places,
        ends: _Places,
        kept: Sequence[StateCheckpoint] = (),
    ) -> None:
        """Add tokens [starts, ends) to their rows' pages. `kept`: states to write twice."""
        numbers, places = _places(starts, ends)
        owners = rows[numbers]
        tokens = step.tokens[step.offsets[owners] + places]
        tokens = np.where(places < step.known[owners], tokens, self._newest[step.slots[owners]])
        parts = tokens.astype(np.uint64) + _ONE
        pages, indices = np.divmod(places, self._tables.page_size)
        for table, weights in enumerate(self._token_weights):
            written = step.pages[owners, table, pages]
            self._pool[written[indices == 0]] = _ZERO
            np.add.at(self._pool, written, parts * weights[indices])
        if self._tables.state_pages:
            added = parts * state_token_weights(places)
            self._add_to_states(step.state[rows], starts, ends, added, kept)

    def _add_to_states(
        self,
        own: Ints,
        starts: _Places,
        ends: _Places,
        added: Words,
        kept: Sequence[StateCheckpoint],
    ) -> None:
        """Add the tokens of rows to their recurrent states.

        Args:
            own: state pages of each row.
            added: value to add for each token.
            kept: states to write to other pages as well.
        """
        firsts = np.cumsum(ends - starts) - (ends - starts)
        before = np.where(starts[:, None] > 0, self._pool[own], _ZERO)
        sums = np.add.reduceat(added, firsts)
        self._pool[own] = before + sums[:, None] * self._state_weights
        for each in kept:
            first = firsts[each.row]
            part = added[first : first + each.num_tokens].sum(dtype=np.uint64)
            self._pool[each.pages] = before[each.row] + part * self._state_weights

    def _resume(self, batch: ScheduleBatch, step: StepRows) -> None:
        """Copy the recurrent states from which rows continue."""
        for each in batch.resumed:
            self._pool[step.state[each.row]] = self._pool[each.pages]

    def _sampled(
        self, step: StepRows, rows: _Places, ends: _Places
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Return each row's token after `ends` tokens, and whether the device drafts it."""
        totals = self._totals(step, rows, ends)
        sampled = tokens_of(totals)
        self._newest[step.slots[rows]] = sampled
        return sampled, is_accepted(totals, self._draft_acceptance)

    def _totals(self, step: StepRows, rows: _Places, ends: _Places) -> Words:
        """Return the total of each row, from the witnesses of all pages that it attends to."""
        columns = np.arange(step.pages.shape[2])
        is_seen = columns < -(-ends[:, None] // self._tables.page_size)
        totals = np.zeros(len(rows), np.uint64)
        for table, window in enumerate(self._tables.windows):
            seen = is_seen
            if window is not None:
                seen = seen & (columns >= first_page(ends[:, None], window, self._tables))
            witnesses = np.where(seen, self._pool[step.pages[rows, table]], _ZERO)
            weighted = witnesses * self._place_weights[: len(columns)]
            totals += weighted.sum(axis=1, dtype=np.uint64)
        if self._tables.state_pages:
            states = self._pool[step.state[rows]] * self._state_weights
            totals += states.sum(axis=1, dtype=np.uint64)
        return totals

    def _copy(self, batch: ScheduleBatch) -> None:
        if (out := batch.swap_out) is not None:
            self._host_pool[out.host_pages] = self._pool[out.device_pages]
        if (back := batch.swap_in) is not None:
            self._pool[back.device_pages] = self._host_pool[back.host_pages]


def _places(starts: _Places, ends: _Places) -> tuple[_Places, _Places]:
    """Return the row and the position of each token in [starts, ends), row by row."""
    counts = ends - starts
    rows = np.repeat(np.arange(len(counts)), counts)
    behind = np.cumsum(counts) - ends
    return rows, np.arange(len(rows)) - behind[rows]
