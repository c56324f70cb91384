"""The offload tiers below the prefix tree: host memory and files.

    the tree learns a page --save--> host memory too --write--> a file too
    ... evicted when space is needed: tree first, host memory next, files last ...
    the tree  <--load--  host memory  <--read--  a file,  before a prompt's turn

Inserted pages are copied to the tiers at once, concurrently with steps. Eviction therefore never
waits, because the copy already exists. Only requests that will use a copy wait for it. Loaded pages
belong to the tree, not to the request that needs them.

A copy holds its pages (COPY), on the device and in host memory, until it ends. Loaded pages are
inserted into the tree at the end of the copy. Pages of windows and of recurrent states are stored
with the page of tokens to which they belong. A request can continue after a page of tokens for
which all of them are present.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from common.page_tables import PageTables
from common.requests.namespace import Namespace
from engine.batch.batch import Ints, PageCopies
from engine.batch.holding import PageHolding
from engine.kv_cache.kv_events import CacheRecorder
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.kv_cache.radix_nodes import PageKey, RadixNode
from engine.offload.file_cache import FileCache
from engine.offload.file_tier import FileTier, PageStore
from engine.offload.host_cache import HostCache
from engine.offload.page_files import FileFault
from engine.offload.saves import TierCopier, TierCopies, TierSaves
from engine.offload.tier_matches import TierMatch, TierMatches


class CacheTiers:
    """The tiers of one engine. Engine thread only.

    Attributes:
        host: the tier of host memory.
        files: the tier below host memory. None: there are no files.
        saves: saves of inserted pages to host memory.
        loaded_pages: loaded pages of all tables since the start, used or not.
        used_pages: loaded pages of tokens from which a request has continued since the start. Key:
            whether only a file had them.

    Args:
        host_pages: pages of host memory, some of which may have other holders.
        cache: the tree. It must be empty.
    """

    def __init__(
        self,
        host_pages: PageAllocator,
        cache: PrefixCache,
        pages: PageAllocator,
        tables: PageTables,
        copier: TierCopier,
        store: PageStore | None = None,
    ) -> None:
        filed = None if store is None else FileCache(store.num_slots, tables.width, store.found())
        below = () if filed is None else (filed.index,)
        self.host = host = HostCache(host_pages, tables.width, below)
        self.files = None if filed is None or store is None else FileTier(host, filed, store)
        self.saves = TierSaves(host, pages, copier, self.files)
        self.loaded_pages = 0
        self.used_pages = {False: 0, True: 0}
        # Loaded pages from which no request has continued yet, with the key in `used_pages`.
        self._unused: dict[PageKey, bool] = {}
        self._cache = cache
        self._pages = pages
        self._tables = tables
        self._copier = copier
        self._matches = TierMatches(host.index, below[0] if below else None, cache, tables)
        self._loads = TierCopies(host, pages)
        # Callbacks of waiting requests, by TierMatch.key.
        self._coming: dict[PageKey, list[Callable[[], None]]] = {}
        self._age = 0  # number of removals of pages from all tiers
        cache.keep_below(self)

    @property
    def host_tokens(self) -> int:
        """Prompt tokens that were loaded from host memory instead of computed."""
        return self.used_pages[False] * self._tables.page_size

    @property
    def file_tokens(self) -> int:
        """Prompt tokens that were loaded from files, but not from host memory, instead of
        computed."""
        return self.used_pages[True] * self._tables.page_size

    @property
    def busy(self) -> bool:
        """Return whether copies are in progress, or pages are being read or written."""
        files = self.files is not None and self.files.busy
        return bool(self.saves.copies or self._loads or files)

    def copied(self) -> Iterator[Ints]:
        """Yield the device pages that copies hold."""
        yield from self.saves.copies.device_pages()
        yield from self._loads.device_pages()

    def copied_on_host(self) -> Iterator[Ints]:
        yield from self.saves.copies.host_pages()
        yield from self._loads.host_pages()
        if self.files is not None:
            yield from self.files.host_pages()

    def poll(self) -> None:
        """Finish the jobs that are done.

        Raises:
            Exception: the error of a failed copy. It is fatal.
        """
        self.saves.poll()
        if self.files is not None:
            self.files.poll()
        self._loads.poll()

    def close(self) -> None:
        """Stop the threads of files. Writes that are not submitted yet are dropped."""
        if self.files is not None:
            self.files.close()

    def check(self) -> None:
        """Raise EngineFault if pages and keys are inconsistent. O(host pages and slots of
        files)."""
        self.host.check()
        if self.files is not None:
            self.files.cache.check()

    def pages_added(self, node: RadixNode) -> None:
        self.saves.pages_added(node)

    def pages_evicted(self, keys: Sequence[PageKey], names: Sequence[int]) -> list[int]:
        for key in keys:
            self._unused.pop(key, None)
        return self.host.left_tree(keys, names)

    def names(self) -> Iterator[int]:
        return self.host.names()

    def record_in(self, journal: CacheRecorder | None) -> None:
        self.host.journal = journal

    def forget(self, keys: Collection[PageKey]) -> None:
        """See LowerTier. Discards the results of loads in progress, since they may contain such
        pages."""
        self._age += 1
        self.host.forget(keys)
        if self.files is not None:
            self.files.forget(keys)

    def clear(self) -> None:
        """See LowerTier. Discards the results of loads in progress."""
        self._age += 1
        self._unused.clear()
        self.saves.clear()
        self.host.clear()
        if self.files is not None:
            self.files.clear()

    def match(self, token_ids: Ints, namespace: Namespace) -> TierMatch | None:
        """Return the loadable pages for these tokens, or None if a load is not worth it."""
        return self._matches.find(token_ids, namespace)

    def used(self, token_ids: Ints, namespace: Namespace) -> None:
        """Record that a request continues from all of these tokens, which are in the tree."""
        if not self._unused:
            return
        for key in self._cache.keys(token_ids, namespace):
            filed = self._unused.pop(key, None)
            if filed is not None:
                self.used_pages[filed] += 1

    def load(
        self, token_ids: Ints, namespace: Namespace, room: int, then: Callable[[], None]
    ) -> bool:
        """Start to load pages for these tokens, if that is worth it. See `load_match`."""
        match = self.match(token_ids, namespace)
        return match is not None and self.load_match(match, room, then)

    def load_match(self, match: TierMatch, room: int, then: Callable[[], None]) -> bool:
        """Start a load, or wait for a load in progress that begins with the same page.

        Args:
            match: a current result of `match`.
            room: pages that may be allocated now.
            then: called by `poll` at the end of the load, if this returns True.
        """
        coming = self._coming.get(match.key)
        if coming is not None:
            coming.append(lambda: self._load_rest(self._find(match), room, then))
            return True
        if len(match.host) > room:
            return False
        return self._read(match, room, then) if match.filed else self._load_from_host(match, then)

    def _find(self, wanted: TierMatch) -> TierMatch | None:
        return self.match(wanted.token_ids, wanted.namespace)

    def _load_rest(self, match: TierMatch | None, room: int, then: Callable[[], None]) -> None:
        """Load the remaining pages of a request, after the end of the load for which it waited."""
        if match is None or not self.load_match(match, room, then):
            then()

    def _read(self, match: TierMatch, room: int, then: Callable[[], None]) -> bool:
        """Read pages from files. Then load the pages that are in host memory."""

        def read() -> None:
            there = self._matches.find(match.token_ids, match.namespace, filed=False)
            self._load_rest(there, room, then)

        assert self.files is not None
        if not self.files.read(match.filed, match.kept, lambda: self._over(match)):
            return False
        self._coming[match.key] = [read]
        return True

    def _load_from_host(self, match: TierMatch, then: Callable[[], None]) -> bool:
        cached = self._cache.match(match.token_ids, match.namespace)
        prefix = cached.shared[:, : match.prefix].ravel()
        self._pages.hold(prefix, PageHolder.COPY)
        fresh = self._cache.allocate(len(match.host), PageHolder.COPY)
        if fresh is None:
            self._pages.drop(prefix, PageHolder.COPY)
            return False
        self._coming[match.key] = [then]
        copy, age = self._copier.load(PageCopies(fresh, match.host)), self._age
        held = np.concatenate((prefix, fresh))
        self._loads.add(copy, held, match.kept, lambda: self._take_in(match, fresh, age))
        return True

    def _take_in(self, match: TierMatch, fresh: Ints, age: int) -> None:
        """Insert loaded pages into the tree."""
        here = self._cache.match(match.token_ids, match.namespace).shared[:, : match.prefix]
        # Otherwise the pages, or the prefix before them, were removed in the meantime.
        if age == self._age and here.shape[1] == match.prefix:
            holding = PageHolding.laid_out(self._tables, here, fresh, len(match.token_ids))
            self._cache.insert(match.token_ids, holding, match.namespace, state=holding.state)
            self.loaded_pages += len(fresh)
            gained = match.gained // self._tables.page_size
            keys = self._cache.keys(match.token_ids, match.namespace)[-gained:]
            for key in keys:
                entry = self.host.index.get(key)
                self._unused[key] = entry is not None and entry.from_file
            for kept in match.kept:
                kept.from_file = False
        self._over(match)

    def _over(self, match: TierMatch) -> None:
        for then in self._coming.pop(match.key):
            then()


def tier_gauges(tiers: CacheTiers, page_bytes: int) -> Mapping[str, float]:
    """Return the metrics of the tiers by internal name. O(host pages)."""
    host, files = tiers.host, tiers.files
    gauges: dict[str, float] = {
        "tier_pages/host": host.num_cached,
        "total_tier_tokens/host": tiers.host_tokens,
        "total_tier_bytes/saved": tiers.saves.num_pages * page_bytes,
        "total_tier_bytes/loaded": tiers.loaded_pages * page_bytes,
        "total_tier_evicted/host": host.index.num_evicted,
    }
    if files is None:
        return gauges
    return gauges | {
        "tier_pages/file": files.cache.num_filled,
        "total_tier_tokens/file": tiers.file_tokens,
        "total_tier_bytes/written": files.num_written * page_bytes,
        "total_tier_bytes/read": files.num_read * page_bytes,
        "total_tier_evicted/file": files.cache.index.num_evicted,
        **{f"total_tier_faults/{each.value}": files.faults[each] for each in FileFault},
    }
