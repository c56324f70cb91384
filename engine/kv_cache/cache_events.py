"""Events of the prefix cache for its subscribers: pages that were added or removed.

    PrefixCache --stored, removed--> CacheJournal --take--> CacheEvents --> the desk, once a step

Without a subscriber there is no journal, and the tree only checks `is None`. A page is named by the
prefix that it ends (common/requests/namespace.py). This module does not know the subscribers.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from common.requests.namespace import Namespace
from engine.batch.batch import Ints

# changes kept for one `take`; beyond this limit the next event lists all pages
MAX_RECORDED = 1 << 16


class StoredRun(NamedTuple):
    """Pages that follow each other in the cache.

    Attributes:
        names: of the pages. The cache changes this list later.
        tokens: [len(names) * page_size], their token ids.
        parent: name of the page before them; None: they begin a prompt.
    """

    names: Sequence[int]
    tokens: Ints
    parent: int | None
    namespace: Namespace


class CacheRecorder(Protocol):
    """The receiver of the changes of a cache, in order. Engine thread only."""

    def stored(self, run: StoredRun) -> None: ...

    def removed(self, pages: Iterable[int]) -> None: ...


class CacheChange(NamedTuple):
    """All changes since the previous event. Unordered sets; no page is in both."""

    cleared: bool  # earlier events are void
    stored: Sequence[int]
    removed: Sequence[int]


class CacheJournal:
    """The net changes since the last `take`, bounded. Engine thread only."""

    def __init__(self, max_pages: int = MAX_RECORDED) -> None:
        self._max_pages = max_pages
        self._is_stored: dict[int, bool] = {}
        self.overflowed = False  # changes are missing

    def stored(self, run: StoredRun) -> None:
        self._note(dict.fromkeys(run.names, True))

    def removed(self, pages: Iterable[int]) -> None:
        self._note(dict.fromkeys(pages, False))

    def take(self) -> tuple[list[int], list[int]]:
        """Return the stored and the removed pages, and clear the journal."""
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


class RecordedChange(Protocol):
    """The prefix cache, as this module uses it."""

    @property
    def page_size(self) -> int: ...

    def record_in(self, journal: CacheRecorder | None) -> None:
        """Record every change from now on in `journal`."""
        ...

    def page_names(self) -> list[int]:
        """Return the names of all pages in the cache. Only valid while it records changes."""
        ...


class CacheEvents:
    """The event source of one cache, which may be stopped. Engine thread only."""

    def __init__(self, cache: RecordedChange, max_pages: int = MAX_RECORDED) -> None:
        self._cache = cache
        self._max_pages = max_pages
        self._journal: CacheJournal | None = None
        self.page_size = cache.page_size

    def start(self) -> None:
        """Start recording. Names every page in the cache: about 25 ms per 100,000 pages."""
        self._journal = CacheJournal(self._max_pages)
        self._cache.record_in(self._journal)

    def stop(self) -> None:
        self._journal = None
        self._cache.record_in(None)

    def everything(self) -> CacheChange:
        """Return all pages that are in the cache now, as a new subscriber needs them."""
        return CacheChange(True, self._cache.page_names(), ())

    def take(self) -> CacheChange | None:
        """Return the changes since the last call, or None if there are none."""
        if self._journal is None or self._journal.empty:
            return None
        if self._journal.overflowed:
            self._journal.take()
            return self.everything()
        return CacheChange(False, *self._journal.take())
