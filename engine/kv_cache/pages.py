"""Who holds which KV page. One count per page and kind of holder; nothing else counts pages.

A page is free exactly when nobody holds it. This module knows page numbers only: not what is in
a page, not which request or peer a hold belongs to.
"""

from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFault
from engine.batch.batch import Ints

# An array, since numpy converts a Python int anew in every call: half the time of a short one.
_ONE = np.array(1, np.int32)

Pages: TypeAlias = NDArray[np.integer[Any]]  # numpy indexes fastest by np.intp


class Holder(IntEnum):
    """Why a page must not be given away."""

    REQUEST = 0  # a live request's page table points at it; the radix lock is this hold
    STEP = 1  # a launched forward, or a copy before it, may still write or read it
    READ = 2  # bytes of a peer's pages may still land in it
    PUBLICATION = 3  # a peer may still read it
    COPY = 4  # it is being copied, to another tier or from there, beside the steps
    CACHE = 5  # it is in the radix tree; of a host page: in the tier below


class FreeList(Protocol):
    """Pages that nobody holds, and the order in which they are given out."""

    def __len__(self) -> int: ...

    def put(self, pages: Ints) -> None: ...

    def take(self, num_pages: int) -> Ints:
        """At most `num_pages`, which must not exceed the length."""
        ...

    def remove(self, pages: Ints) -> None: ...

    def all(self) -> Ints: ...


class AscendingRuns:
    """Gives out ascending page numbers, so that a prompt's pages tend to be neighbours.

    What was freed waits unsorted until the sorted part runs out: a sort is paid once per round
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
        self._sorted = np.sort(np.concatenate([self._sorted, *self._freed]))
        self._freed.clear()


class LastFreed:
    """Gives out what was freed last: in tests, whoever lets go of a page too early meets its
    next owner at once."""

    def __init__(self, num_pages: int) -> None:
        self._stack = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def put(self, pages: Ints) -> None:
        self._stack.extend(pages[::-1].tolist())

    def take(self, num_pages: int) -> Ints:
        at = len(self._stack) - num_pages
        taken, self._stack = self._stack[at:], self._stack[:at]
        return np.array(taken[::-1], np.int32)

    def remove(self, pages: Ints) -> None:
        gone = set(pages.tolist())
        self._stack = [page for page in self._stack if page not in gone]

    def all(self) -> Ints:
        return np.array(self._stack, np.int32)


class PageAllocator:
    """The pages of one pool. Engine thread only.

    Every call that takes pages wants them distinct within that call. Holds of one kind add up:
    two requests may hold one page. Evictable: held by the cache alone, however often.

    Attributes:
        num_pages: pages in the pool, constant.
        num_evictable: pages that `RadixCache.evict` can free now.
        num_released: counts pages that stopped being in use, ever; whoever found no room tries
            again when it has moved.
    """

    def __init__(self, num_pages: int, *, lifo: bool = False) -> None:
        self.num_pages = num_pages
        self.num_evictable = 0
        self.num_released = 0
        self._free: FreeList = LastFreed(num_pages) if lifo else AscendingRuns(num_pages)
        self._holds = np.zeros((len(Holder), num_pages), np.int32)
        self._of = tuple(self._holds)  # by holder, views
        self._cached = self._of[Holder.CACHE]
        self._total = np.zeros(num_pages, np.int32)  # column sums of _holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int, holder: Holder) -> Ints | None:
        """Takes free pages and holds them for `holder`. All or nothing; never evicts."""
        if num_pages > len(self._free):
            return None
        pages = self._free.take(num_pages)
        self._holds[holder, pages] = 1
        self._total[pages] = 1
        if holder is Holder.CACHE:
            self.num_evictable += num_pages
        return pages

    def hold(self, pages: Pages, holder: Holder) -> None:
        """One more hold on pages that somebody holds already.

        Raises:
            EngineFault: one of them is free.
        """
        total = self._total[pages]
        if np.count_nonzero(total) < len(pages):
            raise EngineFault(f"{holder.name} wants to hold free pages {pages[total == 0]}")
        if self.num_evictable and holder is not Holder.CACHE:
            self.num_evictable -= int(np.count_nonzero(total <= self._cached[pages]))
        self._of[holder][pages] += _ONE
        self._total[pages] = total + _ONE

    def hold_even_free(self, pages: Pages, holder: Holder) -> None:
        """As `hold`, and pages that are free leave the free list. O(free pages)."""
        free = pages[self._total[pages] == 0].astype(np.int32)
        if len(free):
            self._free.remove(free)
            self._holds[holder, free] = 1
            self._total[free] = 1
            if holder is Holder.CACHE:
                self.num_evictable += len(free)
        self.hold(pages[~np.isin(pages, free)], holder)

    def drop(self, pages: Pages, holder: Holder) -> None:
        """Ends one hold of this kind on each page; frees those that nobody holds any more.

        Raises:
            EngineFault: one of them is not held by `holder`.
        """
        held = self._of[holder][pages]
        if np.count_nonzero(held) < len(pages):
            raise EngineFault(
                f"{holder.name} drops pages that it does not hold: {pages[held == 0]}"
            )
        self._of[holder][pages] = held - _ONE
        total = self._total[pages] - _ONE
        self._total[pages] = total
        num_loose = int(np.count_nonzero(total <= self._cached[pages]))  # held by the cache at most
        if not num_loose:
            return
        free = pages[total == 0].astype(np.int32)
        if holder is Holder.CACHE:
            self.num_evictable -= len(free)
        else:
            self.num_evictable += num_loose - len(free)
            self.num_released += num_loose
        if len(free):
            self._free.put(free)

    def held_only_by(self, pages: Pages, holder: Holder) -> NDArray[np.bool_]:
        """For each page: is it held, and by nobody but `holder`?"""
        total = self._total[pages]
        only: NDArray[np.bool_] = (total > 0) & (self._holds[holder, pages] == total)
        return only

    def holds(self, holder: Holder) -> Ints:
        """How often this kind holds each page of the pool. A copy."""
        counts: Ints = self._holds[holder].copy()
        return counts

    def by_holder(self) -> dict[str, int]:
        """Free pages, and those of each kind of holder; together they are the pool. O(num_pages).

        A page that several kinds hold counts for the first of them in the order of Holder, so
        "cache" are the evictable ones."""
        counts = {"free": self.num_free}
        left = self._total > 0
        for holder in Holder:
            mine = left & (self._of[holder] > 0)
            counts[holder.name.lower()] = int(np.count_nonzero(mine))
            left &= ~mine
        return counts

    def check(self) -> None:
        """Raises EngineFault where the books disagree. O(num_pages)."""
        total = self._holds.sum(axis=0, dtype=np.int32)
        free = self._free.all()
        listed = np.zeros(self.num_pages, np.bool_)
        listed[free] = True
        evictable = int(np.count_nonzero((total > 0) & (total == self._cached)))
        for sentence, wrong in (
            ("negative holds", bool((self._holds < 0).any())),
            ("total is not the sum of the holds", not np.array_equal(total, self._total)),
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
