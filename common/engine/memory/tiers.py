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

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from common.engine.memory.cache_events import CacheJournal
from common.engine.memory.host_cache import HostCache, HostPages
from common.engine.memory.page_keys import PageKey, page_keys
from common.engine.memory.pages import Holder, PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.memory.radix_nodes import Node
from common.engine.memory.radix_windows import last_within
from common.engine.rows.batch import Ints, PageCopies
from common.engine.rows.holding import NO_PAGE, Holding
from common.errors import EngineFault
from common.page_tables import PageTables
from common.requests.namespace import Namespace

LEAST_TOKENS = 64  # fewer are computed sooner than a prompt has waited for them
SAVING_SHARE = 16  # no more than this part of either memory is being saved at once,
LEAST_SAVING = 8  # or so many pages
MAX_BEHIND = 1024  # nodes that wait to be saved; of more those that have waited longest are not
SLACK_SHARE = 8  # of the keys: so many may go until what is used is marked as used anew


class Copy(Protocol):
    @property
    def done(self) -> bool:
        """Raises what the copy raised."""
        ...


class Copier(Protocol):
    """Copies pages beside the steps. Saves are done in their order, and so are brings."""

    def save(self, copies: PageCopies) -> Copy: ...

    def bring(self, copies: PageCopies) -> Copy: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A copy under way, and what is held for it: of host pages all that go with those copied."""

    copy: Copy
    device: Ints
    host: Ints
    kept: Sequence[HostPages]
    then: Callable[[], None]


class _Way(NamedTuple):
    """What can be brought of a prompt."""

    prefix: int  # whole pages that full tables have of it
    end: int  # pages of tokens that there will be
    gained: int  # tokens that one need not compute then
    key: PageKey  # of the first page that is brought, or the last
    kept: Sequence[HostPages]
    host: Ints  # as PageTables.handed_over has them


class _Lacking(NamedTuple):
    """What is not below of one page of tokens: pages on the device by place in HostPages.pages."""

    key: PageKey
    name: int
    pages: dict[int, int]


@dataclass(slots=True, eq=False)
class _Brought:
    token_ids: Ints
    namespace: Namespace
    way: _Way
    fresh: Ints
    age: int  # of the tiers, when it began
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class TierCounts:
    """Since the start. Tokens that were brought back for a prompt; pages that were copied."""

    brought_tokens: int = 0
    brought_pages: int = 0
    saved_pages: int = 0


class Tiers:
    """Engine thread only.

    Attributes:
        host: the pages below; others hold some of them too.
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
        self.host = host
        self.counts = TierCounts()
        self._enabled = enabled and cache.enabled
        self._cache = cache
        self._pages = pages
        self._tables = tables
        self._width = tables.num_tables + tables.state_pages
        self._copier = copier
        self._saves: deque[_Job] = deque()
        self._brings: deque[_Job] = deque()
        self._brought: dict[PageKey, _Brought] = {}
        self._num_saving = 0
        self._behind: dict[Node, None] = {}  # learnt, and not all of it is being saved yet
        self._age = 0  # times that everything was forgotten
        # A window may be filled, and a state added, in a node that was saved before.
        self._settles = not tables.sliding and not tables.state_pages
        if self._enabled:
            cache.keep_below(self)

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._saves or self._brings)

    def copied(self) -> Iterator[Ints]:
        """Pages on the device that are held for copies."""
        return (job.device for job in (*self._saves, *self._brings))

    def copied_on_host(self) -> Iterator[Ints]:
        return (job.host for job in (*self._saves, *self._brings))

    def poll(self) -> None:
        """Takes up the copies that are done.

        Raises:
            Exception: what a copy raised.
        """
        for jobs in (self._saves, self._brings):
            while jobs and jobs[0].copy.done:
                job = jobs.popleft()
                job.then()
                self._pages.drop(job.device, Holder.COPY)
                self.host.unpin(job.kept, job.host)
        while self._behind and not self._num_saving:
            node = next(iter(self._behind))
            if node.parent is None or self._save_path(node):
                del self._behind[node]
            elif not self._num_saving:
                break  # requests have all of host memory

    def check(self) -> None:
        """Raises EngineFault where host pages and keys disagree. O(host pages)."""
        self.host.check()

    # What the tree tells --------------------------------------------------------------------------

    def learnt(self, node: Node) -> None:
        """It has these pages, from the first of a prompt to the last of the node. What is not below
        yet is saved, when it is its turn."""
        for each in (node, *node.above()):  # what is deepest is forgotten first
            if not self._is_settled(each):
                self.host.touch(reversed(each.keys))
        self._save_path(node)

    def _save_path(self, node: Node) -> bool:
        """Saves what is not below of a node and of those above, first things first. False: there is
        no room for all of it; its turn will come."""
        room = self._room_to_save()
        lacking: list[_Lacking] = []
        for each in (*reversed([*node.above()]), node):
            if self._is_settled(each):
                continue
            for one in self._lacking(each):
                room -= len(one.pages)
                if room < 0:
                    self._save(lacking)
                    self._behind[node] = None
                    if len(self._behind) > MAX_BEHIND:
                        del self._behind[next(iter(self._behind))]
                    return False
                lacking.append(one)
            each.settled_at = self.host.num_evicted
        self._save(lacking)
        return True

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
        self._behind.clear()
        self.host.clear()

    def _is_settled(self, node: Node) -> bool:
        """Everything of it was below not long ago, and marked as used."""
        slack = len(self.host) // SLACK_SHARE
        return self._settles and self.host.num_evicted - node.settled_at <= slack

    def _room_to_save(self) -> int:
        smaller = min(self._pages.num_pages, self.host.pages.num_pages)
        most = max(smaller // SAVING_SHARE, LEAST_SAVING, self._width)
        return min(most - self._num_saving, self.host.num_available)

    def _lacking(self, node: Node) -> Iterator[_Lacking]:
        """Of the node's pages those that are not below."""
        columns = node.pages.T.tolist()
        columns[-1] += node.state.tolist()
        for key, name, column in zip(node.keys, node.names, columns, strict=True):
            kept = self.host.get(key)
            pages = {
                place: page
                for place, page in enumerate(column)
                if page != NO_PAGE and (kept is None or kept.pages[place] == NO_PAGE)
            }
            if pages:
                yield _Lacking(key, name, pages)

    def _save(self, lacking: Sequence[_Lacking]) -> None:
        device = np.array([page for one in lacking for page in one.pages.values()], np.int32)
        if not len(device):
            return
        host = self.host.allocate(len(device), Holder.CACHE)
        assert host is not None  # room was looked at before
        self._pages.hold(device, Holder.COPY)
        numbers = host.tolist()
        saved: list[HostPages] = []
        for one in reversed(lacking):  # what is deepest is forgotten first
            kept = self.host.add(one.key, one.name, self._width)
            for place in reversed(one.pages):
                kept.pages[place] = numbers.pop()
            kept.saves += 1
            saved.append(kept)
        self._num_saving += len(device)
        copy = self._copier.save(PageCopies(device, host))
        pinned = self.host.pin(saved)
        self._saves.append(_Job(copy, device, pinned, saved, lambda: self._landed(saved, device)))

    def _landed(self, saved: Sequence[HostPages], device: Ints) -> None:
        self._num_saving -= len(device)
        self.counts.saved_pages += len(device)
        for kept in saved:
            kept.saves -= 1

    # What is brought back -------------------------------------------------------------------------

    def num_tokens(self, token_ids: Ints, namespace: Namespace) -> int:
        """After how many of these one could go on, once what is below were brought back; 0: from
        nowhere that the tree does not know."""
        way = self._way(token_ids, namespace)
        return 0 if way is None else way.end * self._tables.page_size

    def bring(
        self, token_ids: Ints, namespace: Namespace, room: int, then: Callable[[], None]
    ) -> bool:
        """Begins to bring back what is below of these tokens, if it is worth it. True: `then` is
        going to be called, by `poll`, when that is over.

        Args:
            room: pages that may be taken now.
        """
        way = self._way(token_ids, namespace)
        if way is None:
            return False
        under_way = self._brought.get(way.key)
        if under_way is not None:  # the same, or something that begins alike
            under_way.waiting.append(lambda: self._bring_rest(token_ids, namespace, room, then))
            return True
        prefix = self._cache.match(token_ids, namespace).shared[:, : way.prefix].ravel()
        if len(way.host) > room:
            return False
        self._pages.hold(prefix, Holder.COPY)
        fresh = self._cache.allocate(len(way.host), Holder.COPY)
        if fresh is None:
            self._pages.drop(prefix, Holder.COPY)
            return False
        tokens = token_ids[: way.end * self._tables.page_size]
        brought = self._brought[way.key] = _Brought(tokens, namespace, way, fresh, self._age)
        brought.waiting.append(then)
        copy = self._copier.bring(PageCopies(fresh, way.host))
        held, pinned = np.concatenate((prefix, fresh)), self.host.pin(way.kept)
        self._brings.append(_Job(copy, held, pinned, way.kept, lambda: self._take_in(brought)))
        return True

    def _bring_rest(
        self, token_ids: Ints, namespace: Namespace, room: int, then: Callable[[], None]
    ) -> None:
        if not self.bring(token_ids, namespace, room, then):
            then()

    def _take_in(self, brought: _Brought) -> None:
        """Into the tree with it."""
        del self._brought[brought.way.key]
        way, size = brought.way, self._tables.page_size
        here = self._cache.match(brought.token_ids, brought.namespace).shared[:, : way.prefix]
        # Else it was forgotten meanwhile, or what it goes on from.
        if brought.age == self._age and here.shape[1] == way.prefix:
            end = way.end * size
            holding = Holding.laid_out(self._tables, here, brought.fresh, end)
            self._cache.insert(brought.token_ids, holding, brought.namespace, state=holding.state)
            self.counts.brought_tokens += way.gained
            self.counts.brought_pages += len(brought.fresh)
        for then in brought.waiting:
            then()

    def _way(self, token_ids: Ints, namespace: Namespace) -> _Way | None:
        """None: there is nothing below that is worth it."""
        if not self._enabled:
            return None
        tables, size = self._tables, self._tables.page_size
        match = self._cache.match(token_ids, namespace)
        prefix = match.shared.shape[1]
        keys, kept = self._below(token_ids, namespace, prefix)
        end = self._last_resumable(kept)
        gained = end * size - match.num_tokens
        if gained < LEAST_TOKENS:
            return None
        prefix = min(prefix, end)
        pages = np.array([self._pages_of(each) for each in kept[:end]], np.int32).T
        holding = Holding(pages[: tables.num_tables], pages[tables.num_tables :, -1])
        spans = tables.handed_over(end * size, prefix * size)
        first = min(span.first if span.table < tables.num_tables else end - 1 for span in spans)
        return _Way(
            prefix,
            end,
            gained,
            keys[min(prefix, end - 1)],
            [each for each in kept[first:end] if each is not None],
            holding.take(spans),
        )

    def _below(
        self, token_ids: Ints, namespace: Namespace, prefix: int
    ) -> tuple[list[PageKey], list[HostPages | None]]:
        """Keys of as many pages as full tables have in the tree, or below without a gap; and what
        is below of each of them."""
        keys = self._cache.keys(token_ids, namespace)[:prefix]
        kept = [self._landed_of(key) for key in keys]
        above = keys[-1] if keys else namespace
        rest = token_ids[prefix * self._tables.page_size :]
        for key in page_keys(above, rest, self._tables.page_size):
            each = self._landed_of(key)
            if each is None or NO_PAGE in each.pages[: self._tables.num_full]:
                break
            keys.append(key)
            kept.append(each)
        return keys, kept

    def _landed_of(self, key: PageKey) -> HostPages | None:
        kept = self.host.get(key)
        return kept if kept is not None and not kept.saves else None

    def _pages_of(self, kept: HostPages | None) -> list[int]:
        if kept is not None:
            return kept.pages
        return [NO_PAGE] * self._width

    def _last_resumable(self, kept: Sequence[HostPages | None]) -> int:
        """After how many of these pages one can go on from what is below alone, but for full
        tables."""
        tables, end = self._tables, len(kept)
        if not end or self._settles:
            return end
        pages = np.array([self._pages_of(each) for each in kept], np.int32).T
        while end:
            if tables.state_pages:
                whole = (pages[tables.num_tables :, :end] >= 0).all(axis=0)
                end = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
            within = last_within(tables, pages[: tables.num_tables, :end])
            if within == end:
                break
            end = within
        return end


def no_tiers(cache: RadixCache, pages: PageAllocator, tables: PageTables) -> Tiers:
    """Nothing is kept below."""
    host, copier = HostCache(0), _NoCopier()
    return Tiers(host, enabled=False, cache=cache, pages=pages, tables=tables, copier=copier)


class _NoCopier:
    def save(self, copies: PageCopies) -> Copy:
        raise EngineFault("there is no tier to copy to")

    def bring(self, copies: PageCopies) -> Copy:
        raise EngineFault("there is no tier to copy from")
