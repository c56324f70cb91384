"""What the prefix cache tells whoever watches it: pages that came and pages that went.

    RadixCache --stored, removed--> CacheJournal --take--> CacheEvents --> the desk, once a step

Without a watcher there is no journal: the tree asks `is None` and nothing else. A page is named by
the prefix that it ends (common/requests/prefix_hash.py). Nobody here knows who watches.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_UNTOLD = 1 << 16  # changes kept for one `take`; with more it tells everything anew


class CacheChange(NamedTuple):
    """Everything since the change before. Sets: without order, no page in both."""

    cleared: bool  # what was told before is void
    stored: Sequence[int]
    removed: Sequence[int]


class CacheJournal:
    """The net changes since they were last taken, bounded. Engine thread only."""

    def __init__(self, max_pages: int = MAX_UNTOLD) -> None:
        self._max_pages = max_pages
        self._is_stored: dict[int, bool] = {}
        self.overflowed = False  # changes are missing

    def stored(self, pages: Iterable[int]) -> None:
        self._note(dict.fromkeys(pages, True))

    def removed(self, pages: Iterable[int]) -> None:
        self._note(dict.fromkeys(pages, False))

    def take(self) -> tuple[list[int], list[int]]:
        """Pages stored and pages removed, and forgets them."""
        changes, self._is_stored, self.overflowed = self._is_stored, {}, False
        stored = [page for page, is_stored in changes.items() if is_stored]
        return stored, [page for page, is_stored in changes.items() if not is_stored]

    @property
    def empty(self) -> bool:
        return not self._is_stored and not self.overflowed

    def _note(self, changes: dict[int, bool]) -> None:
        if self.overflowed:
            return
        self._is_stored.update(changes)
        if len(self._is_stored) > self._max_pages:
            self.overflowed = True
            self._is_stored.clear()


class Journalled(Protocol):
    """The prefix cache, as seen from here."""

    @property
    def page_size(self) -> int: ...

    def tell(self, journal: CacheJournal | None) -> None:
        """From now on every change goes to `journal`."""
        ...

    def page_names(self) -> list[int]:
        """Of every page in it. Only while it tells."""
        ...


class CacheEvents:
    """Watches one cache, or does not. Engine thread only."""

    def __init__(self, cache: Journalled, max_pages: int = MAX_UNTOLD) -> None:
        self._cache = cache
        self._max_pages = max_pages
        self._journal: CacheJournal | None = None
        self.page_size = cache.page_size

    def start(self) -> None:
        """Names every page that the cache has: some 25 ms for each 100,000 pages."""
        self._journal = CacheJournal(self._max_pages)
        self._cache.tell(self._journal)

    def stop(self) -> None:
        self._journal = None
        self._cache.tell(None)

    def everything(self) -> CacheChange:
        """All that is there now, as one who has been told nothing needs it."""
        return CacheChange(True, self._cache.page_names(), ())

    def take(self) -> CacheChange | None:
        """What has changed since the last call; None: nothing."""
        if self._journal is None or self._journal.empty:
            return None
        if self._journal.overflowed:
            self._journal.take()
            return self.everything()
        return CacheChange(False, *self._journal.take())
