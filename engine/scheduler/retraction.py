"""Retraction: choose requests to swap out to host memory when pages run out, and swap them in.

    running --retract--> SAVING --(batch with its swap_out)--> SAVED --resume--> RETURNING
                    `--> LOST --(no step in flight)--> waiting queue                |
                                                  running <--(batch with its swap_in)

A retracted request keeps its slot, its tokens, and a token that may still be in flight. Copies and
forwards run in order on one stream, so neither waits for the other. Rows of a batch may therefore
reuse the pages that the swap_out of the same batch saves. For all others, the STEP hold keeps these
pages allocated until the step is finished.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints, PageCopies
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.running import RunningBatch, missing_pages_of_one

_NOTHING = np.empty(0, np.int32)


class _State(Enum):
    SAVING = auto()  # the next step holds device_pages
    SAVED = auto()
    LOST = auto()  # host memory was full: the KV must be recomputed
    RETURNING = auto()  # device_pages are new, and host_pages are needed until the copy is done


@dataclass(slots=True, eq=False)
class _Retracted:
    request: Request
    slot: int
    state: _State
    had: PageHolding  # pages with KV at retraction
    device_pages: Ints
    host_pages: Ints
    left: float  # time of retraction, by the clock

    def rank(self, now: float) -> float:
        return self.request.rank(now - self.left)


@dataclass(frozen=True, slots=True, eq=False)
class HostSwaps:
    """The copies of one step between device and host memory.

    saved: the pages of swap_out, one array per request, because two requests with a common prefix
    share pages.
    """

    swap_out: PageCopies | None = None
    swap_in: PageCopies | None = None
    saved: Sequence[Ints] = ()

    def on_host(self) -> list[Ints]:
        """Return the host pages of each copy."""
        return [copies.host_pages for copies in (self.swap_out, self.swap_in) if copies is not None]


NO_SWAPS = HostSwaps()


class RetractedRequests:
    """Swapped-out requests and the host pages with their KV. The most urgent one returns first,
    equal ones in the order in which they were retracted.

    Args:
        hold_written: see LaunchedSteps.
    """

    def __init__(self, core: EngineCore, hold_written: Callable[[int], None]) -> None:
        self._hold_written = hold_written
        self._table = core.table
        self._pages = core.pages
        self._host = core.host_pages
        self._allocate_host = core.allocate_host
        self._clock = core.clock
        self._by_key: dict[int, _Retracted] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._by_key

    @property
    def num_host_pages_used(self) -> int:
        return sum(len(entry.host_pages) for entry in self._by_key.values())

    @property
    def num_host_pages_free(self) -> int:
        """Number of host pages that may be allocated, including pages of the evictable host
        cache."""
        return self._host.num_available

    def host_pages(self) -> list[Ints]:
        return [entry.host_pages for entry in self._by_key.values()]

    @property
    def num_away(self) -> int:
        """Number of swapped-out requests that are not on their way back."""
        return sum(1 for _ in self._away()) if self._by_key else 0

    @property
    def saving(self) -> bool:
        """Return whether the next batch has pages to copy to the host."""
        return bool(self._in(_State.SAVING))

    def highest_rank(self) -> float:
        """Return the highest rank of swapped-out requests. Requires at least one request."""
        now = self._clock()
        return max(entry.rank(now) for entry in self._by_key.values())

    def num_saved(self, slot: int) -> int:
        """Return the number of host pages that the request in that slot would need."""
        return len(self._saved_of(slot).flat())

    def retract(self, request: Request) -> Ints:
        """Drop and return the request's pages, so that the caller can reuse the free ones.

        Only rows of the next batch may allocate these pages before `save` is called.
        """
        slot = request.slot
        assert slot is not None
        now, had = self._clock(), self._saved_of(slot)
        holding = self._table.holding_of(slot)
        pages = holding.flat()
        self._hold_written(slot)
        self._table.set_pages(slot, PageHolding.none(len(holding.tables)))
        self._pages.drop(pages, PageHolder.REQUEST)
        request.swapped_out(now)
        saved = had.flat()
        host_pages = self._allocate_host(len(saved), PageHolder.REQUEST)
        if host_pages is None:
            entry = _Retracted(request, slot, _State.LOST, had, _NOTHING, _NOTHING, now)
        else:
            entry = _Retracted(request, slot, _State.SAVING, had, saved, host_pages, now)
        self._by_key[request.key] = entry
        return pages

    def save(self, request: Request) -> bool:
        """Hold the request's pages, including free ones, for the step that copies them to the host.

        Returns:
            False if host memory was full and the request has to be recomputed.
        """
        entry = self._by_key[request.key]
        if entry.state is _State.SAVING:
            self._pages.hold_even_free(entry.device_pages, PageHolder.STEP)
        return entry.state is _State.SAVING

    def unsaved_pages(self) -> list[Ints]:
        """Return the pages that the next batch copies to the host before its forward, per
        request."""
        return [entry.device_pages for entry in self._in(_State.SAVING)]

    def next_saved(self, rank_to_exceed: float = -math.inf) -> tuple[int, PageHolding] | None:
        """Return slot and former pages of the next request to swap in, or None. Its rank must
        exceed `rank_to_exceed`. It needs as many pages as it had."""
        now = self._clock()
        able = (entry for entry in self._away() if entry.rank(now) > rank_to_exceed)
        entry = max(able, key=lambda entry: entry.rank(now), default=None)
        if entry is None or entry.state is not _State.SAVED:
            return None
        return entry.slot, entry.had

    def resume(self, slot: int, pages: Ints) -> None:
        """Assign pages that are already held for the request. The next batch fills them from the
        host."""
        entry = next(entry for entry in self._by_key.values() if entry.slot == slot)
        now = self._clock()
        entry.state = _State.RETURNING
        entry.request.swapped_in(now)
        entry.request.away_s += now - entry.left
        entry.left = now
        entry.device_pages = pages
        self._table.set_pages(slot, entry.had.moved_to(pages))

    def returning(self) -> NDArray[np.intp]:
        """Return the slots that the next batch swaps in."""
        return np.array([entry.slot for entry in self._in(_State.RETURNING)], np.intp)

    def take_lost(self) -> list[Request]:
        """Remove and return the LOST requests whose tokens are all known. They must be
        recomputed."""
        lost = self._in(_State.LOST)
        known = [entry.request for entry in lost if not self._table.in_flight(entry.slot)]
        for request in known:
            del self._by_key[request.key]
        return known

    def swaps(self) -> HostSwaps:
        """Return the copies of the batch being built.

        The caller holds the pages of swap_in for the step. `save` has already added one hold per
        request to the pages of swap_out. Host pages are held until `swapped`.
        """
        saving, returning = self._in(_State.SAVING), self._in(_State.RETURNING)
        swaps = HostSwaps(_copies(saving), _copies(returning), self.unsaved_pages())
        for host_pages in swaps.on_host():
            self._host.hold(host_pages, PageHolder.STEP)
        for entry in saving:
            entry.state, entry.device_pages = _State.SAVED, _NOTHING
        for entry in returning:
            del self._by_key[entry.request.key]
            self._host.drop(entry.host_pages, PageHolder.REQUEST)
        return swaps

    def swapped(self, swaps: HostSwaps) -> None:
        """Release the host pages of the copies of a finished step."""
        for host_pages in swaps.on_host():
            self._host.drop(host_pages, PageHolder.STEP)

    def forget(self, request: Request) -> None:
        """Remove a request that ended. The caller drops the device pages that the request has
        again."""
        entry = self._by_key.pop(request.key)
        self._host.drop(entry.host_pages, PageHolder.REQUEST)
        if entry.state is _State.SAVING:
            self._pages.drop(entry.device_pages, PageHolder.STEP)

    def _in(self, state: _State) -> list[_Retracted]:
        return [entry for entry in self._by_key.values() if entry.state is state]

    def _away(self) -> Iterator[_Retracted]:
        return (e for e in self._by_key.values() if e.state is not _State.RETURNING)

    def _saved_of(self, slot: int) -> PageHolding:
        """Return the pages with KV: of every token except the newest, which may be in flight."""
        holding = self._table.holding_of(slot)
        num_pages = self._table.tables.num_pages(int(self._table.length[slot]) - 1)
        return PageHolding(holding.tables[:, :num_pages], holding.state)


def _copies(entries: list[_Retracted]) -> PageCopies | None:
    if not entries:
        return None
    return PageCopies(
        device_pages=np.concatenate([entry.device_pages for entry in entries]),
        host_pages=np.concatenate([entry.host_pages for entry in entries]),
    )


class Retraction:
    """Swaps out requests when pages run out, and swaps them in again. Engine thread only.

    Args:
        every: retract one request every this many decode steps even if pages suffice. 0: never.
    """

    def __init__(
        self, core: EngineCore, running: RunningBatch, retracted: RetractedRequests, every: int
    ) -> None:
        self._table = core.table
        self._pages = core.pages
        self._cache = core.cache
        self._running = running
        self._retracted = retracted
        self._num_tables = core.table.tables.num_tables
        self._every = every
        self._num_decodes = 0
        self.num_retractions = 0
        self.num_recomputed = 0

    def is_due(self) -> bool:
        """Count a decode step. Return whether a request must be retracted although pages
        suffice."""
        self._num_decodes += 1
        return self._every > 0 and self._num_decodes % self._every == 0

    def retract_for(
        self, slots: NDArray[np.intp], requests: Mapping[int, Request], least: int = 0
    ) -> NDArray[np.intp]:
        """Retract requests until the other rows have the pages that they need.

        Args:
            least: number of requests to retract even if the pages suffice.
        Returns:
            The rows of the next batch. At least one request is kept. It is not among the rows if it
                must wait for a page that another holder has.
        """
        # Requests that are just coming back are not retracted.
        coming_back = np.isin(slots, self._retracted.returning())
        victims = victims_first(self._table, slots[~coming_back])
        retracted: list[Request] = []
        given_up = np.unique(np.concatenate([_NOTHING, *self._retracted.unsaved_pages()]))
        while True:
            full = self._running.full(slots)
            spare = given_up[self._pages.held_only_by(given_up, PageHolder.STEP)]
            missing = len(full) * self._num_tables - self._cache.num_available - len(spare)
            suffices = missing <= 0 and len(retracted) >= least
            if suffices or not victims or len(slots) == 1:
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

    def swap_in(self, *, device_empty: bool, max_requests: int, rank_to_exceed: float) -> None:
        """Give pages to swapped-out requests that fit again, in the order of their rank.

        Args:
            device_empty: whether nothing runs or is prefilled. Then a request that fits at all
                comes back.
            max_requests: maximum number of requests to swap in.
            rank_to_exceed: only requests with a higher rank come back.
        """
        for _ in range(max_requests):
            first = self._retracted.next_saved(rank_to_exceed)
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
        """Append a page per table to as many rows of `full` as possible, and return their number.
        Uses free and evictable pages, then `spare`, which only steps hold."""
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
        """Return the pages to keep free for a request that returns with as many pages as it had.
        These may be more than its tokens need, if drafts were rejected since."""
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
    """Return running requests in the order of retraction: least urgent first, then fewest outputs,
    then longest prompt."""
    prompts = table.num_prompt[slots]
    outputs = table.length[slots] - prompts
    victims: list[int] = slots[np.lexsort((-prompts, outputs, table.priority[slots]))].tolist()
    return victims
