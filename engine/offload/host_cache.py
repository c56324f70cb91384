"""The pages of host memory: KV of retracted requests, and the first offload tier.

The pages of the tier are found by key (radix_nodes.py). Requests have precedence over them. The
least recently inserted or loaded entries are evicted first. This module does not copy pages. It
only knows the copies in progress.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from common.errors import EngineFault
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.kv_events import CacheRecorder
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix_nodes import PageKey
from engine.offload.file_cache import FileCache, FiledPages


@dataclass(slots=True, eq=False)
class HostPages:
    """The KV of one page of tokens, in host memory.

    Attributes:
        name: name by which routers know the page.
        pages: by table, then pages of the state after it, if one is kept. NO_PAGE where absent.
        in_tree: whether the prefix tree has it, too.
        copies: copies in progress to or from these pages. The entry is not evicted before they end.
        saves: the copies to these pages among them. The entry is incomplete until they end.
        from_file: whether it was read from a file and not loaded to the device since.
    """

    name: int
    pages: list[int]
    in_tree: bool = True
    copies: int = 0
    saves: int = 0
    from_file: bool = False

    def present(self) -> list[int]:
        return [page for page in self.pages if page != NO_PAGE]


class HostCache:
    """Host memory: pages of retracted requests, and the first offload tier. Engine thread only.

    Attributes:
        pages: holders of each host page. REQUEST: KV of a retracted request. STEP: a launched step
            copies it. COPY: another copy is in progress. CACHE: it can be found by its key.
        num_evicted: keys evicted since the start.
        journal: receives the keys that neither the tree nor a file has any more.
        files: the next tier.
    """

    def __init__(self, num_pages: int, files: FileCache | None = None) -> None:
        self.pages = PageAllocator(num_pages)
        self.files = FileCache(0, 0) if files is None else files
        self.num_evicted = 0
        self.journal: CacheRecorder | None = None
        self._kept: OrderedDict[PageKey, HostPages] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._kept

    def get(self, key: PageKey) -> HostPages | None:
        return self._kept.get(key)

    @property
    def num_cached(self) -> int:
        """Number of pages that can be found by key. O(pages)."""
        return int(np.count_nonzero(self.pages.holds(PageHolder.CACHE)))

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can return."""
        return self.pages.num_free + self.pages.num_evictable

    def allocate(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate as PageAllocator.allocate does, evicting if needed. Evicts nothing if it
        fails."""
        short = num_pages - self.pages.num_free
        if short > self.pages.num_evictable:
            return None
        if short > 0:
            self._evict(short)
        return self.pages.allocate(num_pages, holder)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Record that the tree has these pages, and that they were used now. The last key is
        evicted last."""
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None:
                kept.in_tree = True
                self._kept.move_to_end(key)
            self.files.touch(key)

    def add(self, key: PageKey, name: int, num_pages: int, *, in_tree: bool = True) -> HostPages:
        """Return the entry of this key. It is created with `num_pages` places if it does not
        exist."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = HostPages(name, [NO_PAGE] * num_pages, in_tree)
        return kept

    def take_in(self, read: Iterable[tuple[PageKey, FiledPages, int, int]], width: int) -> None:
        """Add pages that were read from files: key, entry, place, and a held host page. If another
        host page already has the same content, it stays."""
        taken = []
        for key, filed, place, page in read:
            kept = self.add(key, filed.name, width, in_tree=filed.in_tree)
            if kept.pages[place] == NO_PAGE:
                kept.pages[place] = page
                kept.from_file = True
                taken.append(page)
        self.pages.hold(np.array(taken, np.int32), PageHolder.CACHE)

    def pin(self, kept: Sequence[HostPages]) -> Ints:
        """Hold all pages of these entries for a copy, and return them. The entries must be
        distinct."""
        for each in kept:
            each.copies += 1
        pages = np.array([page for each in kept for page in each.present()], np.int32)
        self.pages.hold(pages, PageHolder.COPY)
        return pages

    def unpin(self, kept: Sequence[HostPages], pages: Ints) -> None:
        """Drop the holds of a copy that `pin` has added."""
        for each in kept:
            each.copies -= 1
        self.pages.drop(pages, PageHolder.COPY)

    def left_tree(self, keys: Sequence[PageKey], names: Sequence[int]) -> list[int]:
        """Record that the tree has evicted these pages. Return the names of the pages that are in
        no tier either."""
        self.files.left_tree(keys)
        lost = []
        for key, name in zip(keys, names, strict=True):
            kept = self._kept.get(key)
            if kept is not None:
                kept.in_tree = False
            elif key not in self.files:
                lost.append(name)
        return lost

    def left_files(self, gone: Iterable[tuple[PageKey, FiledPages]]) -> None:
        """Record that no file has these pages any more."""
        if self.journal is not None:
            left = (filed.name for key, filed in gone if not filed.in_tree and key not in self)
            self.journal.removed(left)

    def names(self) -> Iterator[int]:
        """Yield the names of all pages here, and of those in files."""
        yield from (kept.name for kept in self._kept.values())
        yield from self.files.names()

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Remove these keys if they are here. Pages being copied stay held until the copy ends."""
        self._drop([(key, self._kept.pop(key)) for key in keys if key in self._kept])

    def clear(self) -> None:
        """Remove everything. Pages being copied stay held until the copy ends."""
        kept = list(self._kept.items())
        self._kept.clear()
        self._drop(kept)

    def check(self) -> None:
        """Raise EngineFault if keys and page counts are inconsistent. O(pages)."""
        self.pages.check()
        pages = np.fromiter(
            chain.from_iterable(each.pages for each in self._kept.values()), np.int32
        )
        cached = pages[pages != NO_PAGE]
        counts = np.bincount(cached, minlength=self.pages.num_pages)
        if not np.array_equal(counts, self.pages.holds(PageHolder.CACHE)):
            raise EngineFault(f"host pages: {len(cached)} are found by their keys, others are held")

    def _evict(self, num_pages: int) -> None:
        """Evict keys without copies in progress until `num_pages` are free."""
        gone: list[tuple[PageKey, HostPages]] = []
        busy: list[tuple[PageKey, HostPages]] = []
        left = num_pages
        while left > 0 and self._kept:
            key, kept = self._kept.popitem(last=False)
            if kept.copies:
                busy.append((key, kept))
                continue
            gone.append((key, kept))
            left -= len(kept.present())
        for key, kept in reversed(busy):
            self._kept[key] = kept
            self._kept.move_to_end(key, last=False)
        self.num_evicted += len(gone)
        self._drop(gone)

    def _drop(self, gone: Sequence[tuple[PageKey, HostPages]]) -> None:
        pages = [page for _, kept in gone for page in kept.present()]
        self.pages.drop(np.array(pages, np.int32), PageHolder.CACHE)
        if self.journal is not None:
            self.journal.removed(
                kept.name for key, kept in gone if not kept.in_tree and key not in self.files
            )
