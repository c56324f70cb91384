"""The tier of host memory below the prefix tree: what the tree forgets is brought back from there.

    the tree learns a page --save--> host memory too --the tree forgets it--> host memory alone
                                                   <--bring, before a prompt's turn--'

Whatever the tree learns is copied at once, beside the steps. So eviction waits for nothing: the
copy is there already. Nobody waits for a copy but who is going to have use for it. What is brought
belongs to the tree, not to who wanted it.

A page is held for COPY, on the device and in host memory, until its copy is over. What a copy
brings the tree learns then. Pages of windows and of states are kept with the page of tokens that
they go with: one can go on from where all of them are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.engine.memory.cache_events import CacheJournal
from common.engine.memory.page_keys import PageKey
from common.engine.memory.pages import Holder, PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.memory.radix_nodes import Node
from common.engine.rows.batch import Ints, PageCopies
from common.engine.rows.holding import Holding
from common.engine.tiers.copies import Copier, Copies, Copy
from common.engine.tiers.host_cache import HostCache
from common.engine.tiers.saves import Saves
from common.engine.tiers.ways import Way, Ways
from common.errors import EngineFault
from common.page_tables import PageTables
from common.requests.namespace import Namespace


@dataclass(slots=True, eq=False)
class _Brought:
    way: Way
    fresh: Ints
    age: int  # of the tiers, when it began
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Tiers:
    """Engine thread only.

    Attributes:
        host: the pages below; others hold some of them too.
        saves: what the tree has learnt, on its way there.
        brought_tokens, brought_pages: since the start.
    """

    def __init__(
        self,
        host: HostCache,
        *,
        enabled: bool,
        cache: RadixCache,
        pages: PageAllocator,
        tables: PageTables,
        copier: Copier,
    ) -> None:
        """Has the tree tell what it learns, if `enabled`."""
        width = tables.num_tables + tables.state_pages
        self.host = host
        self.saves = Saves(host, pages, copier, width=width)
        self.brought_tokens = 0
        self.brought_pages = 0
        self._enabled = enabled and cache.enabled
        self._cache = cache
        self._pages = pages
        self._tables = tables
        self._copier = copier
        self._ways = Ways(host, cache, tables)
        self._brings = Copies(host, pages)
        self._brought: dict[PageKey, _Brought] = {}
        self._age = 0  # times that everything was forgotten
        if self._enabled:
            cache.keep_below(self)

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self.saves.copies or self._brings)

    def copied(self) -> Iterator[Ints]:
        """Pages on the device that are held for copies."""
        yield from self.saves.copies.device_pages()
        yield from self._brings.device_pages()

    def copied_on_host(self) -> Iterator[Ints]:
        yield from self.saves.copies.host_pages()
        yield from self._brings.host_pages()

    def poll(self) -> None:
        """Takes up the copies that are done.

        Raises:
            Exception: what a copy raised.
        """
        self.saves.poll()
        self._brings.poll()

    def check(self) -> None:
        """Raises EngineFault where host pages and keys disagree. O(host pages)."""
        self.host.check()

    # What the tree tells --------------------------------------------------------------------------

    def learnt(self, node: Node) -> None:
        self.saves.learnt(node)

    def left(self, keys: Sequence[PageKey], names: Sequence[int]) -> list[int]:
        """The tree has forgotten these; returns the names of those that nobody has any more."""
        return self.host.left_tree(keys, names)

    def names(self) -> Iterator[int]:
        return self.host.names()

    def tell(self, journal: CacheJournal | None) -> None:
        self.host.journal = journal

    def clear(self) -> None:
        """The tree is emptied, and so is everything below. What is on its way is nobody's then."""
        self._age += 1
        self.saves.clear()
        self.host.clear()

    # What is brought back -------------------------------------------------------------------------

    def way(self, token_ids: Ints, namespace: Namespace) -> Way | None:
        """None: there is nothing below of these tokens that is worth it."""
        return self._ways.find(token_ids, namespace) if self._enabled else None

    def bring(self, way: Way, room: int, then: Callable[[], None]) -> bool:
        """Begins to bring it back, or waits for who brings something that begins alike. True:
        `then` is going to be called, by `poll`, when that is over.

        Args:
            way: of now.
            room: pages that may be taken now.
        """
        under_way = self._brought.get(way.key)
        if under_way is not None:
            under_way.waiting.append(lambda: self._bring_rest(way, room, then))
            return True
        if len(way.host) > room:
            return False
        match = self._cache.match(way.token_ids, way.namespace)
        prefix = match.shared[:, : way.prefix].ravel()
        self._pages.hold(prefix, Holder.COPY)
        fresh = self._cache.allocate(len(way.host), Holder.COPY)
        if fresh is None:
            self._pages.drop(prefix, Holder.COPY)
            return False
        brought = self._brought[way.key] = _Brought(way, fresh, self._age)
        brought.waiting.append(then)
        copy = self._copier.bring(PageCopies(fresh, way.host))
        held = np.concatenate((prefix, fresh))
        self._brings.add(copy, held, way.kept, lambda: self._take_in(brought))
        return True

    def _bring_rest(self, wanted: Way, room: int, then: Callable[[], None]) -> None:
        """Of what was wanted while something was brought that begins alike."""
        way = self.way(wanted.token_ids, wanted.namespace)
        if way is None or not self.bring(way, room, then):
            then()

    def _take_in(self, brought: _Brought) -> None:
        """Into the tree with it."""
        way = brought.way
        del self._brought[way.key]
        here = self._cache.match(way.token_ids, way.namespace).shared[:, : way.prefix]
        # Else it was forgotten meanwhile, or what it goes on from.
        if brought.age == self._age and here.shape[1] == way.prefix:
            holding = Holding.laid_out(self._tables, here, brought.fresh, len(way.token_ids))
            self._cache.insert(way.token_ids, holding, way.namespace, state=holding.state)
            self.brought_tokens += way.gained
            self.brought_pages += len(brought.fresh)
        for then in brought.waiting:
            then()


def no_tiers(cache: RadixCache, pages: PageAllocator, tables: PageTables) -> Tiers:
    """Nothing is kept below."""
    host, copier = HostCache(0), _NoCopier()
    return Tiers(host, enabled=False, cache=cache, pages=pages, tables=tables, copier=copier)


class _NoCopier:
    def save(self, copies: PageCopies) -> Copy:
        raise EngineFault("there is no tier to copy to")

    def bring(self, copies: PageCopies) -> Copy:
        raise EngineFault("there is no tier to copy from")
