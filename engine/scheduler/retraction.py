"""Retraction: which requests to swap out when pages run out, and when to bring them back.

Rows of a batch may get the pages that the same batch's swap_out saves, because the copies run
before the forward on one stream. For all others the step's STEP hold keeps them allocated until it
is finished.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.growth import missing_pages_of_one
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.running import RunningBatch

_NOTHING = np.empty(0, np.int32)


class Retraction:
    """The swap-out and return of requests, so that the running batch fits the pages. Engine thread
    only."""

    def __init__(
        self, core: EngineCore, running: RunningBatch, retracted: RetractedRequests
    ) -> None:
        self._table = core.table
        self._pages = core.pages
        self._cache = core.cache
        self._running = running
        self._retracted = retracted
        self._num_tables = core.table.tables.num_tables
        self.num_retractions = 0
        self.num_recomputed = 0

    def make_room(
        self, slots: NDArray[np.intp], requests: Mapping[int, Request]
    ) -> NDArray[np.intp]:
        """Retract requests until the other rows can continue, and give those their pages.

        Returns:
            The rows of the next batch. One request is always kept. It is not among the rows if
                it has to wait for a page that another holder has.
        """
        # Requests that are just coming back are no victims.
        coming_back = np.isin(slots, self._retracted.returning())
        victims = victims_first(self._table, slots[~coming_back])
        retracted: list[Request] = []
        given_up = np.unique(np.concatenate([_NOTHING, *self._retracted.unsaved_pages()]))
        while True:
            full = self._running.full(slots)
            spare = given_up[self._pages.held_only_by(given_up, PageHolder.STEP)]
            missing = len(full) * self._num_tables - self._cache.num_available - len(spare)
            if missing <= 0 or not victims or len(slots) == 1:
                break
            slot = victims.pop(0)
            self._running.leave(slot)
            slots = slots[slots != slot]
            given_up = np.union1d(given_up, self._retracted.retract(requests[slot]))
            retracted.append(requests[slot])
        num_grown = self._grow(full, spare)
        for request in retracted:
            self.num_recomputed += not self._retracted.save(request)
        if retracted:
            self.num_retractions += len(retracted)
            self._raise_ratio()
        return slots[~np.isin(slots, full[num_grown:])]

    def bring_back(self, *, device_empty: bool, num_places: int, bar: float) -> None:
        """Give pages to retracted requests that fit again, in the order of their rank.

        Args:
            device_empty: nothing runs or is computed, so that a request that fits at all comes
                back.
            num_places: maximum number of requests to bring back.
            bar: requests whose rank is not above it do not come back yet.
        """
        for _ in range(num_places):
            first = self._retracted.next_saved(bar)
            if first is None:
                return
            slot, had = first
            num_pages = len(had.flat())
            growth = self._growth_after(slot, had)
            if device_empty:
                needed = num_pages + min(growth, self._num_tables)
            else:
                needed = num_pages + growth + self._running.growth()
            if needed > self._cache.num_available:
                return
            pages = self._cache.allocate(num_pages, PageHolder.REQUEST)
            assert pages is not None
            self._retracted.resume(slot, pages)
            self._running.join(slot)
            device_empty = False

    def _grow(self, full: NDArray[np.intp], spare: Ints) -> int:
        """Append a page in each table for as many of `full` as there are pages: free and evictable
        ones, then `spare`, which only steps hold. Return the number of grown rows."""
        num_available = self._cache.num_available
        num_grown = min(len(full), (num_available + len(spare)) // self._num_tables)
        num_pages = num_grown * self._num_tables
        fresh = self._cache.allocate(min(num_pages, num_available), PageHolder.REQUEST)
        assert fresh is not None
        spare = spare[: num_pages - len(fresh)]
        self._pages.hold(spare, PageHolder.REQUEST)
        self._table.append_pages(full[:num_grown], np.concatenate([fresh, spare]))
        return num_grown

    def _raise_ratio(self) -> None:
        table, left = self._table, self._running.slots
        prompts = table.num_prompt[left]
        self._running.ratio.raise_after_retraction(
            generated=int((table.length[left] - prompts).sum()),
            max_new=int(np.maximum(table.max_length[left] - prompts, 0).sum()),
            num_requests=len(left),
        )

    def _growth_after(self, slot: int, had: PageHolding) -> int:
        """Return the pages to keep free for it once it is back with as many pages as it had. Those
        may be more than its tokens need, since drafts may have been rejected after it left."""
        table, size = self._table, self._table.page_size
        length = int(table.length[slot])
        missing = missing_pages_of_one(
            length,
            int(table.max_length[slot]),
            had.num_pages * size,
            self._running.ratio.value,
            size,
        )
        return table.tables.growth(length - 1, missing)


def victims_first(table: SlotTable, slots: NDArray[np.intp]) -> list[int]:
    """Return the order in which to swap out running requests: least urgent first, then fewest
    outputs, then longest prompt."""
    prompts = table.num_prompt[slots]
    outputs = table.length[slots] - prompts
    victims: list[int] = slots[np.lexsort((-prompts, outputs, table.priority[slots]))].tolist()
    return victims
