"""The running batch: rows that decode, one token each per step.

Slots and columns only; a row costs Python work when it joins, leaves or grows by a page.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.table import RequestTable
from engine.kv_cache.pages import Holder
from engine.kv_cache.radix import RadixCache
from engine.scheduler.growth import missing_pages


class RunningBatch:
    """Slots of requests whose prompt is computed, or will be by a launched step."""

    def __init__(self, table: RequestTable, cache: RadixCache) -> None:
        self._table = table
        self._cache = cache
        self._member = np.zeros(table.num_slots, np.bool_)
        self._slots: NDArray[np.intp] = np.empty(0, np.intp)
        self._stale = False

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def slots(self) -> NDArray[np.intp]:
        """Ascending; the same array until somebody joins or leaves. Not to be changed."""
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
        """Harmless where the slot is not in it."""
        if self._member[slot]:
            self._member[slot] = False
            self._stale = True

    def growth(self, ratio: float, slots: NDArray[np.intp] | None = None) -> int:
        """Pages to keep free for what is running, or for some of it."""
        table, slots = self._table, self.slots if slots is None else slots
        missing = missing_pages(
            table.length[slots],
            table.max_length[slots],
            table.capacity[slots],
            ratio,
            table.page_size,
        )
        return table.growth(slots, missing)

    def ready(self) -> NDArray[np.intp]:
        """Rows that want another token now: those whose last one is in flight want none, and held
        ones wait for their mask."""
        slots = self.slots
        wants = self._table.length[slots] < self._table.max_length[slots]
        if np.count_nonzero(self._table.held):
            wants &= ~self._table.held[slots]
        return slots if np.count_nonzero(wants) == len(slots) else slots[wants]

    def full(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those whose next token needs a page that they do not have yet."""
        return slots[self._table.length[slots] > self._table.capacity[slots]]

    def grow(self, slots: NDArray[np.intp]) -> bool:
        """One page more for each, in every table, evicting as needed. All or nothing."""
        pages = self._cache.allocate(len(slots) * self._table.tables.num_tables, Holder.REQUEST)
        if pages is None:
            return False
        self._table.append_pages(slots, pages)
        return True
