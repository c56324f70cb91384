"""The pages of host memory: those with the KV of retracted requests, and in all others the tier
below the prefix tree, which is found by key (page_keys.py).

What a request needs goes before what is cached. Of that goes first what was learnt or brought back
longest ago. Knows nothing of copies but that some are under way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from common.errors import EngineFault
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.cache_events import CacheJournal
from engine.kv_cache.page_keys import PageKey
from engine.kv_cache.pages import Holder, PageAllocator
from engine.offload.file_cache import FileCache, FiledPages


@dataclass(slots=True, eq=False)
class HostPages:
    """The KV of one page of tokens.

    Attributes:
        name: what routers know it by.
        pages: by table, then of the state after it, if one is kept; NO_PAGE where there is none.
        in_tree: the prefix tree has it too.
        copies: under way, into these pages or from them: until they are over it stays.
        saves: of these, into them: until they are over it is not all there.
        from_file: it was read from a file, and has not been brought to the device since.
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
    """Engine thread only.

    Attributes:
        pages: who holds which host page. REQUEST: with the KV of a retracted one; STEP: a launched
            one copies it; COPY: so does somebody else; CACHE: it is found by its key.
        num_evicted: keys that are not here any more, since the start.
        journal: is told of those that neither the tree nor a file has.
        files: the tier below this one.
    """

    def __init__(self, num_pages: int, files: FileCache | None = None) -> None:
        self.pages = PageAllocator(num_pages)
        self.files = FileCache(0, 0) if files is None else files
        self.num_evicted = 0
        self.journal: CacheJournal | None = None
        self._kept: OrderedDict[PageKey, HostPages] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._kept

    def get(self, key: PageKey) -> HostPages | None:
        return self._kept.get(key)

    @property
    def num_cached(self) -> int:
        """Pages that are found by their keys. O(pages)."""
        return int(np.count_nonzero(self.pages.holds(Holder.CACHE)))

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self.pages.num_free + self.pages.num_evictable

    def allocate(self, num_pages: int, holder: Holder) -> Ints | None:
        """As PageAllocator.allocate, forgetting as much as needed; nothing in vain."""
        short = num_pages - self.pages.num_free
        if short > self.pages.num_evictable:
            return None
        if short > 0:
            self._evict(short)
        return self.pages.allocate(num_pages, holder)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """The tree has them, and somebody uses them now; who is named last goes last."""
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None:
                kept.in_tree = True
                self._kept.move_to_end(key)
            self.files.touch(key)

    def add(self, key: PageKey, name: int, num_pages: int, *, in_tree: bool = True) -> HostPages:
        """What is kept under a key, from now on, with room for so many pages."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = HostPages(name, [NO_PAGE] * num_pages, in_tree)
        return kept

    def take_in(self, read: Iterable[tuple[PageKey, FiledPages, int, int]], width: int) -> None:
        """Learns pages that were read from files: key, name and whether the tree has it, place,
        host page, which somebody holds. What is here under other page numbers stays as it is."""
        taken = []
        for key, filed, place, page in read:
            kept = self.add(key, filed.name, width, in_tree=filed.in_tree)
            if kept.pages[place] == NO_PAGE:
                kept.pages[place] = page
                kept.from_file = True
                taken.append(page)
        self.pages.hold(np.array(taken, np.int32), Holder.CACHE)

    def pin(self, kept: Sequence[HostPages]) -> Ints:
        """Holds all pages of these, distinct ones, for a copy; returns which."""
        for each in kept:
            each.copies += 1
        pages = np.array([page for each in kept for page in each.present()], np.int32)
        self.pages.hold(pages, Holder.COPY)
        return pages

    def unpin(self, kept: Sequence[HostPages], pages: Ints) -> None:
        """The copy that `pin` was called for is over."""
        for each in kept:
            each.copies -= 1
        self.pages.drop(pages, Holder.COPY)

    def left_tree(self, keys: Sequence[PageKey], names: Sequence[int]) -> list[int]:
        """The tree has forgotten these; returns the names of those that nobody has any more."""
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
        """No file has these any more."""
        if self.journal is not None:
            left = (filed.name for key, filed in gone if not filed.in_tree and key not in self)
            self.journal.removed(left)

    def names(self) -> Iterator[int]:
        """Of all pages here, and of those in files."""
        yield from (kept.name for kept in self._kept.values())
        yield from self.files.names()

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Those that are here; what is being copied is held until that is over."""
        self._drop([(key, self._kept.pop(key)) for key in keys if key in self._kept])

    def clear(self) -> None:
        """Forgets everything; what is being copied is held until that is over."""
        kept = list(self._kept.items())
        self._kept.clear()
        self._drop(kept)

    def check(self) -> None:
        """Raises EngineFault where keys and page counts disagree. O(pages)."""
        self.pages.check()
        pages = np.fromiter(
            chain.from_iterable(each.pages for each in self._kept.values()), np.int32
        )
        cached = pages[pages != NO_PAGE]
        counts = np.bincount(cached, minlength=self.pages.num_pages)
        if not np.array_equal(counts, self.pages.holds(Holder.CACHE)):
            raise EngineFault(f"host pages: {len(cached)} are found by their keys, others are held")

    def _evict(self, num_pages: int) -> None:
        """Of keys that no copy is under way of, until so many pages are free."""
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
        self.pages.drop(np.array(pages, np.int32), Holder.CACHE)
        if self.journal is not None:
            self.journal.removed(
                kept.name for key, kept in gone if not kept.in_tree and key not in self.files
            )
