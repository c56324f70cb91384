"""The running batch: requests that decode one or more tokens per step, and their expected growth.

It stores only slots and columns, so a row costs Python work only when it joins, leaves or grows.
Quarantined rows (`QuarantineQueue`, see common/request.py) temporarily share no forward with
others.

Keeping pages free for all remaining tokens of a request wastes memory, since most requests end
early. Keeping none free causes retractions. The new-token ratio therefore starts cautious, decays
with each successful step, and rises again after a retraction.
"""

import math

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixCache

NO_SLOTS = np.empty(0, np.intp)
CLIP_NEW_TOKENS = 4096  # limit of the remaining tokens that count per request
# After a retraction, every remaining request must have pages for this many steps.
LOOK_AHEAD_STEPS = 20


class NewTokenRatio:
    """Share of the remaining tokens of running requests for which pages are kept free.

    Args:
        conservativeness: factor of `first` and `last`. The products are limited to 1.
    """

    def __init__(
        self, first: float, last: float, steps: int, conservativeness: float = 1.0
    ) -> None:
        self._first = min(1.0, first * conservativeness)
        self._last = min(self._first, last * conservativeness)
        self._per_step = (self._first - self._last) / steps
        self.value = self._first

    def decay(self) -> None:
        """Lower the ratio after a successful decode step."""
        self.value = max(self._last, self.value - self._per_step)

    def raise_after_retraction(self, generated: int, max_new: int, num_requests: int) -> None:
        """Raise the ratio to the share that the remaining requests have generated, plus a
        look-ahead.

        Args:
            generated: tokens that these requests have generated, in total.
            max_new: tokens that these requests may generate at most, in total.
        """
        ahead = generated + LOOK_AHEAD_STEPS * num_requests
        self.value = max(self.value, min(1.0, ahead / (max_new + 1)))

    def reset(self) -> None:
        """Reset the ratio once no request is running."""
        self.value = self._first


def missing_pages(
    length: Ints, max_length: Ints, capacity: Ints, ratio: float, page_size: int
) -> Ints:
    """Return the pages of one page table to keep free for each running request. All arrays are
    [num_requests].

    A request of `length` tokens computes index length - 1 next, and its last token has no KV. A
    request that continues and whose pages are full therefore counts at least one page.
    """
    remaining = np.minimum(np.maximum(max_length - length, 0), CLIP_NEW_TOKENS)
    tokens = length - 1 + np.ceil(remaining * ratio).astype(np.int32)
    missing = np.maximum(tokens - capacity, 0)
    pages: Ints = (missing + page_size - 1) // page_size
    return pages


def missing_pages_of_one(
    length: int, max_length: int, capacity: int, ratio: float, page_size: int
) -> int:
    """Return `missing_pages` of one request that will run."""
    remaining = min(max(max_length - length, 0), CLIP_NEW_TOKENS)
    missing = length - 1 + math.ceil(remaining * ratio) - capacity
    return max(0, -(-missing // page_size))


class RunningBatch:
    """Slots of requests whose prompt is computed, or will be computed by a launched step.

    Attributes:
        ratio: share of the remaining tokens for which pages are kept free.
    """

    def __init__(self, table: SlotTable, cache: PrefixCache, ratio: NewTokenRatio) -> None:
        self.ratio = ratio
        self._table = table
        self._cache = cache
        self._member = np.zeros(table.num_slots, np.bool_)
        self._slots: NDArray[np.intp] = NO_SLOTS
        self._stale = False

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def slots(self) -> NDArray[np.intp]:
        """Slots in ascending order, read-only. The same array until a request joins or leaves."""
        if self._stale:
            (self._slots,) = self._member.nonzero()
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
        """Return the pages to keep free for the requests in `slots`, by default for all
        requests."""
        table, slots = self._table, self.slots if slots is None else slots
        if not len(slots):
            return 0
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
        and rows that wait for the mask of their grammar."""
        slots = self.slots
        if not len(slots):
            return slots
        wants = self._table.length[slots] < self._table.max_length[slots]
        if np.count_nonzero(self._table.held):
            wants &= ~self._table.held[slots]
        return slots if np.count_nonzero(wants) == len(slots) else slots[wants]

    def full(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows whose next token needs a page that they do not have yet."""
        return slots[self._table.length[slots] > self._table.capacity[slots]]

    def grow(self, slots: NDArray[np.intp]) -> bool:
        """Append a page to every page table of each row, evicting if needed. All or nothing.

        Returns:
            False if the pages do not suffice. Then nothing has changed.
        """
        pages = self._cache.allocate(len(slots) * self._table.tables.num_tables, PageHolder.REQUEST)
        if pages is None:
            return False
        self._table.append_pages(slots, pages)
        return True


class QuarantineQueue:
    """Slots of quarantined requests, which share no forward with others. Engine thread only."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._until: dict[int, int] = {}  # slot: number of tokens at which it is released

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, slot: int, request: Request) -> None:
        """Quarantine a request that starts to run, if it must run alone."""
        if request.quarantined:
            self._until[slot] = request.alone_until

    def forget(self, slot: int) -> None:
        """Remove a request that ended or must be recomputed. Does nothing if the slot is not
        here."""
        self._until.pop(slot, None)

    def let_out(self) -> None:
        """Release requests that have enough known tokens."""
        known = self._table.known
        self._until = {slot: until for slot, until in self._until.items() if known[slot] < until}

    def inside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        return slots[np.isin(slots, list(self._until))]

    def outside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the slots that are not quarantined. Returns `slots` itself if no slot is
        quarantined."""
        return slots[~np.isin(slots, list(self._until))] if self._until else slots
