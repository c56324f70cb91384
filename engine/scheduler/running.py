"""The running batch: rows that decode, one token each per step.

It stores slots and columns only. A row costs Python work only when it joins, leaves or grows.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.table import SlotTable
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.scheduler.growth import NewTokenRatio, missing_pages


class RunningBatch:
    """Slots of requests whose prompt is computed, or will be by a launched step.

    Attributes:
        ratio: of the remaining tokens for which pages are kept free.
    """

    def __init__(self, table: SlotTable, cache: PrefixCache, ratio: NewTokenRatio) -> None:
        self.ratio = ratio
        self._table = table
        self._cache = cache
        self._member = np.zeros(table.num_slots, np.bool_)
        self._slots: NDArray[np.intp] = np.empty(0, np.intp)
        self._stale = False

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def slots(self) -> NDArray[np.intp]:
        """Slots in ascending order. The same array until a request joins or leaves. Read-only."""
        if self._stale:
            self._slots = np.flatnonzero(self._member)
            self._stale = False
        return self._slots

    def __contains__(self, slot: int) -> bool:
        return bool(self._member[slot])

    def join(self, slot: int) -> None:
        self._member[slot] = True
        self._stale = True

    def leave(self, slot: int) -> None:
        """Remove the slot, if it is in the batch."""
        if self._member[slot]:
            self._member[slot] = False
            self._stale = True

    def growth(self, slots: NDArray[np.intp] | None = None) -> int:
        """Return the pages to keep free for all running requests, or for those in `slots`."""
        table, slots = self._table, self.slots if slots is None else slots
        missing = missing_pages(
            table.length[slots],
            table.max_length[slots],
            table.capacity[slots],
            self.ratio.value,
            table.page_size,
        )
        return table.growth(slots, missing)

    def ready(self) -> NDArray[np.intp]:
        """Return the rows that need another token now. Excludes rows whose last token is in flight,
        and held rows that wait for their mask."""
        slots = self.slots
        wants = self._table.length[slots] < self._table.max_length[slots]
        if np.count_nonzero(self._table.held):
            wants &= ~self._table.held[slots]
        return slots if np.count_nonzero(wants) == len(slots) else slots[wants]

    def full(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows whose next token needs a page that they do not have yet."""
        return slots[self._table.length[slots] > self._table.capacity[slots]]

    def grow(self, slots: NDArray[np.intp]) -> bool:
        """Append a page to every table of each row, evicting as needed. Return False, without any
        change, if the pages do not suffice."""
        pages = self._cache.allocate(len(slots) * self._table.tables.num_tables, PageHolder.REQUEST)
        if pages is None:
            return False
        self._table.append_pages(slots, pages)
        return True
