"""The page allocator: counts the holds on each KV page, per kind of holder.

A page is free exactly if it has no holds. This module knows only page numbers. It knows neither the
contents of a page nor the request or node to which a hold belongs.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFault
from engine.batch.batch import Ints
from engine.batch.holding import ONE, ZERO

# numpy indexes several times faster with np.intp, so each call converts the pages once.
Pages: TypeAlias = NDArray[np.integer[Any]]


class PageHolder(IntEnum):
    """The reason why a page must not be reused."""

    REQUEST = 0  # in the page table of a live request, which protects cached pages from eviction
    # A launched forward may still write it although its request has released it, or a copy before
    # the forward may still write or read it.
    STEP = 1
    READ = 2  # bytes from a peer's pages may still arrive in it
    PUBLICATION = 3  # a peer may still read it
    COPY = 4  # copied to or from an offload tier, concurrent with steps
    # In the prefix cache, or for a host page in the host cache. Must be last: the kinds before it
    # are users.
    CACHE = 5


class FreeList(Protocol):
    """The free pages, in the order in which they are allocated."""

    def __len__(self) -> int: ...

    def put(self, pages: Ints) -> None: ...

    def take(self, num_pages: int) -> Ints:
        """Remove and return `num_pages` pages. There must be enough."""
        ...

    def remove(self, pages: Ints) -> None: ...

    def all(self) -> Ints: ...


class AscendingRuns:
    """A free list in ascending order, so that a prompt's pages tend to be neighbours.

    Freed pages stay unsorted until the sorted part is used up. A sort is thus needed once per round
    through the pool, not once per call.
    """

    def __init__(self, num_pages: int) -> None:
        self._sorted = np.arange(num_pages, dtype=np.int32)
        self._freed: list[Ints] = []
        self._num_free = num_pages

    def __len__(self) -> int:
        return self._num_free

    def put(self, pages: Ints) -> None:
        self._freed.append(pages)
        self._num_free += len(pages)

    def take(self, num_pages: int) -> Ints:
        if num_pages > len(self._sorted):
            self._sort()
        taken, self._sorted = self._sorted[:num_pages], self._sorted[num_pages:]
        self._num_free -= num_pages
        return taken

    def remove(self, pages: Ints) -> None:
        self._sort()
        self._sorted = self._sorted[~np.isin(self._sorted, pages)]
        self._num_free = len(self._sorted)

    def all(self) -> Ints:
        self._sort()
        return self._sorted

    def _sort(self) -> None:
        self._sorted = np.concatenate([self._sorted, *self._freed])
        self._sorted.sort()
        self._freed.clear()


class PageAllocator:
    """The pages of one pool. Engine thread only.

    The pages in one call must be distinct. Holds of one kind add up, because two requests may hold
    the same page. A page is evictable if it has only CACHE holds.

    Attributes:
        num_pages: pages in the pool, constant.
        num_evictable: pages that `PrefixCache.evict` can free now.
        num_released: total pages that became free or evictable. Callers that found no free pages
            retry when it has changed.
    Args:
        free_list: creates the free list, given `num_pages`.
    """

    def __init__(
        self, num_pages: int, free_list: Callable[[int], FreeList] = AscendingRuns
    ) -> None:
        self.num_pages = num_pages
        self.num_evictable = 0
        self.num_released = 0
        self._free = free_list(num_pages)
        self._holds = np.zeros((len(PageHolder), num_pages), np.int32)
        self._of = tuple(self._holds)  # views, by holder
        self._cached = self._of[PageHolder.CACHE]
        self._users = np.zeros(num_pages, np.int32)  # holds of all kinds except CACHE

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Return the number of free pages and of pages that only a cache holds and can evict."""
        return len(self._free) + self.num_evictable

    def allocate(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate free pages and hold them for `holder`. All or nothing. Never evicts."""
        if num_pages > len(self._free):
            return None
        pages = self._free.take(num_pages)
        at = pages.astype(np.intp)
        self._of[holder][at] = ONE
        if holder is PageHolder.CACHE:
            self.num_evictable += num_pages
        else:
            self._users[at] = ONE
        return pages

    def hold(self, pages: Pages, holder: PageHolder) -> None:
        """Add a hold on pages that already have one.

        Raises:
            EngineFault: a page is free.
        """
        if not len(pages):
            return
        at, mine = pages.astype(np.intp), self._of[holder]
        users = self._users[at]
        if np.count_nonzero(users) < len(pages):
            unused = at[users == ZERO]
            cached = self._cached[unused]
            if np.count_nonzero(cached) < len(unused):
                free = unused[cached == ZERO]
                raise EngineFault(f"{holder.name} wants to hold free pages {free}")
            if holder is not PageHolder.CACHE:
                self.num_evictable -= len(unused)
        mine[at] = mine[at] + ONE
        if holder is not PageHolder.CACHE:
            self._users[at] = users + ONE

    def hold_even_free(self, pages: Pages, holder: PageHolder) -> None:
        """Add a hold as `hold` does, and remove free pages from the free list. O(free pages)."""
        free = pages[(self._users[pages] + self._cached[pages]) == 0].astype(np.int32)
        if len(free):
            self._free.remove(free)
            self._holds[holder, free] = 1
            if holder is PageHolder.CACHE:
                self.num_evictable += len(free)
            else:
                self._users[free] = 1
        self.hold(pages[~np.isin(pages, free)], holder)

    def drop(self, pages: Pages, holder: PageHolder) -> None:
        """Remove one hold of this kind from each page. Pages without any holds become free.

        Raises:
            EngineFault: a page is not held by `holder`.
        """
        if not len(pages):
            return
        at, mine = pages.astype(np.intp), self._of[holder]
        held = mine[at]
        if np.count_nonzero(held) < len(pages):
            raise EngineFault(
                f"{holder.name} drops pages that it does not hold: {pages[held == 0]}"
            )
        mine[at] = held - ONE
        users = self._users[at]
        if holder is not PageHolder.CACHE:
            users -= ONE
            self._users[at] = users
        unused = _zeros(at, users)
        free = _zeros(unused, self._cached[unused])
        if holder is PageHolder.CACHE:
            self.num_evictable -= len(free)
        else:
            self.num_evictable += len(unused) - len(free)
            self.num_released += len(unused)
        if len(free):
            self._free.put(free.astype(np.int32))

    def unused(self, pages: Pages) -> NDArray[np.bool_]:
        """Return for each page whether no kind of holder except CACHE has it."""
        unused: NDArray[np.bool_] = self._users[pages.astype(np.intp)] == ZERO
        return unused

    def held_only_by(self, pages: Pages, holder: PageHolder) -> NDArray[np.bool_]:
        """Return for each page whether `holder` is its only kind of holder. False for free
        pages."""
        at = pages.astype(np.intp)
        mine = self._of[holder][at]
        all_holds = self._users[at] + self._cached[at]
        only: NDArray[np.bool_] = (mine > ZERO) & (mine == all_holds)
        return only

    def holds(self, holder: PageHolder) -> Ints:
        """Return a copy of the number of holds of this kind on each page of the pool."""
        counts: Ints = self._holds[holder].copy()
        return counts

    def by_holder(self) -> dict[str, int]:
        """Return the number of free pages and of pages per kind of holder. The sum is the pool.
        O(num_pages).

        A page with several kinds of holders counts for the first in the order of PageHolder.
        "cache" therefore counts the evictable pages.
        """
        counts = {"free": self.num_free}
        left = (self._users + self._cached) > 0
        for holder in PageHolder:
            mine = left & (self._of[holder] > 0)
            counts[holder.name.lower()] = int(np.count_nonzero(mine))
            left &= ~mine
        return counts

    def check(self) -> None:
        """Raise EngineFault if the counts are inconsistent. O(num_pages)."""
        users = self._holds[: PageHolder.CACHE].sum(axis=0, dtype=np.int32)
        total = users + self._cached
        free = self._free.all()
        listed = np.zeros(self.num_pages, np.bool_)
        listed[free] = True
        evictable = int(np.count_nonzero((users == 0) & (self._cached > 0)))
        for sentence, wrong in (
            ("negative holds", bool((self._holds < 0).any())),
            ("users are not the sum of the holds", not np.array_equal(users, self._users)),
            ("a page is on the free list twice", np.count_nonzero(listed) != len(free)),
            ("a held page is on the free list", bool((total[listed] > 0).any())),
            (
                "a page is neither free nor held",
                len(free) + np.count_nonzero(total) != self.num_pages,
            ),
            ("the number of evictable pages is wrong", evictable != self.num_evictable),
            ("the number of free pages is wrong", len(free) != self.num_free),
        ):
            if wrong:
                raise EngineFault(f"pages: {sentence}; {self.by_holder()}")


def _zeros(pages: NDArray[np.intp], counts: Ints) -> NDArray[np.intp]:
    """Return the pages whose count is 0."""
    num_others = np.count_nonzero(counts)
    if not num_others:
        return pages
    return pages[counts == ZERO] if num_others < len(pages) else pages[:0]
