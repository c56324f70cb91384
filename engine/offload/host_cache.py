"""Host memory as the first offload tier.

Its pages also hold the KV of retracted requests, which have precedence. This module does not copy
pages. It only knows the copies in progress.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from common.errors import EngineFault
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.kv_events import CacheRecorder
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix_nodes import PageKey
from engine.offload.tier_index import KeyedEntry, TierEntry, TierIndex

MOST_NAMED = 1 << 17  # names of files reported at once: half of a router's limit per node


class HostCache:
    """The tier of host memory. Engine thread only.

    Args:
        below: the index of the files, if there are any.
    Attributes:
        pages: holders of each host page. COPY: a copy is in progress. CACHE: an entry has it.
        journal: receives the names of pages that neither the tree nor a tier has any more.
    """

    def __init__(self, pages: PageAllocator, width: int, below: Sequence[TierIndex] = ()) -> None:
        self.pages = pages
        self.index = TierIndex(width)
        self.journal: CacheRecorder | None = None
        self._below = below
        self._all = (self.index, *below)

    @property
    def num_cached(self) -> int:
        """Number of pages that can be found by key. O(pages)."""
        return int(np.count_nonzero(self.pages.holds(PageHolder.CACHE)))

    def allocate(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate as PageAllocator.allocate does, evicting if needed. Evicts nothing if it
        fails."""
        short = num_pages - self.pages.num_free
        if short > self.pages.num_evictable:
            return None
        if short > 0:
            self._drop(self.index.evict(short, lambda entry: len(entry.present())) or ())
        return self.pages.allocate(num_pages, holder)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Record that the tree has these pages, and that they were used now. The last key is
        evicted last."""
        for key in keys:
            for index in self._all:
                entry = index.touch(key)
                if entry is not None:
                    entry.in_tree = True

    def take_in(self, read: Iterable[tuple[PageKey, TierEntry, int, int]]) -> None:
        """Add pages that were read from files: key, entry there, place, and a held host page. If
        another host page already has the same content, it stays."""
        taken = []
        for key, filed, place, page in read:
            kept = self.index.add(key, filed.name, in_tree=filed.in_tree)
            if kept.places[place] == NO_PAGE:
                kept.places[place] = page
                kept.from_file = True
                taken.append(page)
        self.pages.hold(np.array(taken, np.int32), PageHolder.CACHE)

    def pin(self, kept: Sequence[TierEntry]) -> Ints:
        """Hold all pages of these entries for a copy, and return them. The entries must be
        distinct."""
        for each in kept:
            each.uses += 1
        pages = np.array([page for each in kept for page in each.present()], np.int32)
        self.pages.hold(pages, PageHolder.COPY)
        return pages

    def unpin(self, kept: Sequence[TierEntry], pages: Ints) -> None:
        """Drop the holds of a copy that `pin` has added."""
        for each in kept:
            each.uses -= 1
        self.pages.drop(pages, PageHolder.COPY)

    def left_tree(self, keys: Sequence[PageKey], names: Sequence[int]) -> list[int]:
        """Record that the tree has evicted these pages. Return the names of the pages that are in
        no tier either."""
        lost = []
        for key, name in zip(keys, names, strict=True):
            entries = [entry for index in self._all if (entry := index.get(key)) is not None]
            for entry in entries:
                entry.in_tree = False
            if not entries:
                lost.append(name)
        return lost

    def report_lost(self, gone: Iterable[KeyedEntry]) -> None:
        """Report those of the removed entries of a tier that no other tier and not the tree has."""
        if self.journal is not None:
            self.journal.removed(
                entry.name
                for key, entry in gone
                if not entry.in_tree and not any(key in index for index in self._all)
            )

    def names(self) -> Iterator[int]:
        """Yield the names of all pages here, and of the most recently used ones in files."""
        yield from (kept.name for kept in self.index.entries)
        for index in self._below:
            yield from index.newest_names(MOST_NAMED)

    def forget(self, keys: Collection[PageKey]) -> None:
        """Remove these keys if they are here. Pages being copied stay held until the copy ends."""
        self._drop(self.index.remove(keys))

    def clear(self) -> None:
        """Remove everything. Pages being copied stay held until the copy ends."""
        self._drop(self.index.clear())

    def check(self) -> None:
        """Raise EngineFault if keys and page counts are inconsistent. O(pages)."""
        pages = np.fromiter(
            chain.from_iterable(each.places for each in self.index.entries), np.int32
        )
        cached = pages[pages != NO_PAGE]
        counts = np.bincount(cached, minlength=self.pages.num_pages)
        if not np.array_equal(counts, self.pages.holds(PageHolder.CACHE)):
            raise EngineFault(f"host pages: {len(cached)} are found by their keys, others are held")

    def _drop(self, gone: Sequence[KeyedEntry]) -> None:
        pages = [page for _, kept in gone for page in kept.present()]
        self.pages.drop(np.array(pages, np.int32), PageHolder.CACHE)
        self.report_lost(gone)
