"""Assembly of a step's rows into its ScheduleBatch, and the list of pages that the step holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import ForwardMode, Ints, ScheduleBatch, StateCheckpoint
from engine.batch.table import SlotTable
from engine.kv_cache.pages import Pages
from engine.scheduler.admission import ExtendRow
from engine.scheduler.retraction import HostSwaps
from engine.scheduler.speculation import DecodeRows


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One scheduling decision. It holds its slots and these pages from launch to result."""

    batch: ScheduleBatch
    extends: Sequence[ExtendRow]  # its first rows
    slots: NDArray[np.intp]  # batch.slots
    # pages written by the forward: distinct, since rows share only whole pages of prefixes
    written: Pages
    swaps: HostSwaps

    def held(self) -> list[Pages]:
        """Return the pages to hold, one hold on each page of each array. Each array's pages are
        distinct."""
        swap_in = self.swaps.swap_in
        swapped = [swap_in.device_pages] if swap_in else []
        states = [pages for row in self.extends for pages in row.states]
        return [self.written, *self.swaps.saved, *swapped, *states]


class StepAssembler:
    """A builder and numberer of steps. It does not modify the table."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._page_bits = table.page_size.bit_length() - 1
        # Arrays, because numpy converts a Python int again in every call.
        self._one = np.array(1, np.int32)
        self._shift = np.array(self._page_bits, np.int32)
        self._all = np.ones(table.num_slots, np.bool_)
        self._all.flags.writeable = False  # shared by all batches
        self._decodes = np.empty(0, np.intp)  # of the previous step, and as its batch has them
        self._decodes_in_batch = np.empty(0, np.int32)
        # Slots in flight are recognised by step number. Therefore numbering continues from the
        # previous scheduler that used this table.
        self.num_steps = table.finished_step

    def assemble(
        self,
        extends: Sequence[ExtendRow],
        rows: DecodeRows,
        swaps: HostSwaps,
    ) -> ScheduledStep:
        """Build a step: prompt rows first, then decode rows."""
        table, decodes, early = self._table, rows.slots, rows.early
        ends = table.length[decodes]
        starts = ends - self._one
        if rows.drafts is not None:
            ends = ends + rows.drafts
        if rows.drafts is None and early is None:
            by_table = self._written(decodes, starts >> self._shift)
        else:
            by_table = self._written(*self._spans(decodes, starts, ends, early))
        if table.tables.state_pages:
            by_table.append(table.state[decodes].ravel().astype(np.intp))
        written: Pages = by_table[0] if len(by_table) == 1 else np.concatenate(by_table)
        self.num_steps += 1
        if decodes is not self._decodes:
            self._decodes, self._decodes_in_batch = decodes, decodes.astype(np.int32)
        batch = ScheduleBatch(
            self.num_steps,
            ForwardMode.DECODE if rows.drafts is None else ForwardMode.VERIFY,
            self._decodes_in_batch,
            starts,
            ends,
            self._all[: len(decodes)],
            swaps.swap_out,
            swaps.swap_in,
            early=early,
        )
        step = ScheduledStep(batch, (), decodes, written, swaps)
        return self._with_prompts(extends, step) if extends else step

    def _with_prompts(
        self, extends: Sequence[ExtendRow], of_decodes: ScheduledStep
    ) -> ScheduledStep:
        """Return the step with prompt rows before its decode rows."""
        decodes, early = of_decodes.batch, of_decodes.batch.early
        if early is not None:
            early = np.concatenate([np.zeros(len(extends), np.int32), early])
        slots = np.concatenate([np.array([row.slot for row in extends], np.intp), of_decodes.slots])
        batch = ScheduleBatch(
            decodes.step,
            ForwardMode.MIXED if len(of_decodes.slots) else ForwardMode.EXTEND,
            slots.astype(np.int32),
            np.concatenate([np.array([row.start for row in extends], np.int32), decodes.starts]),
            np.concatenate([np.array([row.end for row in extends], np.int32), decodes.ends]),
            np.concatenate([np.array([row.samples for row in extends]), decodes.samples]),
            decodes.swap_out,
            decodes.swap_in,
            resumed=tuple(
                StateCheckpoint(place, 0, row.resumed)
                for place, row in enumerate(extends)
                if len(row.resumed)
            ),
            kept=tuple(
                StateCheckpoint(place, row.keep - row.start, row.kept)
                for place, row in enumerate(extends)
                if len(row.kept)
            ),
            early=early,
        )
        prompts = [self._pages_of(row) for row in extends]
        written = np.concatenate([of_decodes.written, *prompts])
        return ScheduledStep(batch, extends, slots, written, of_decodes.swaps)

    def _written(self, slots: NDArray[np.intp], places: NDArray[Any]) -> list[NDArray[np.intp]]:
        """Return the page at each place of each slot, table by table."""
        return [pages[slots, places].astype(np.intp) for pages in self._table.by_table]

    def _spans(
        self, slots: NDArray[np.intp], starts: Ints, ends: Ints, early: Ints | None
    ) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Return slots and places of all pages that rows of several tokens may write, wherever each
        row will begin."""
        firsts = (starts if early is None else starts - early) >> self._shift
        counts = ((ends - self._one) >> self._shift) - firsts + self._one
        behind = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(firsts - behind, counts)
        return np.repeat(slots, counts), places

    def _pages_of(self, row: ExtendRow) -> Ints:
        first, past = row.start >> self._page_bits, -(-row.end // self._table.page_size)
        pages: Ints = self._table.page_table[row.slot, :, first:past].ravel()
        return np.concatenate((pages, self._table.state[row.slot]))
