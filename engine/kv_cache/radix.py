"""The prefix cache: a radix tree over token ids, in whole pages of every page table.

common/page_tables.py explains page tables.

In a table with a sliding window, the tree keeps only the pages inside the window at the end of each
inserted prefix. If layers have recurrent states, the tree keeps the states that callers insert. A
prefix may therefore be present in full tables although no request can continue from it. Callers
that get windows and states from another source can still use it.

Namespaces branch at the root: the key of a branch there is its namespace and its first page of
tokens. All namespaces share one clock, so that eviction takes the least recently used pages of all
of them. The tree has no locks. Users of a match hold its pages, and pages with no other holder than
the tree may be evicted. Pages are inserted when their KV is final. The tree does not know requests.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from common.errors import EngineFault
from common.page_tables import PageTables
from common.requests.namespace import BYTES_PER_TOKEN, SHARED, Namespace, PrefixHasher
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.kv_cache.kv_events import CacheRecorder, StoredRun
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix_nodes import (
    NO_STATE,
    PageKey,
    RadixNode,
    TreePages,
    TreeStates,
    TreeWindows,
    last_within,
    page_keys,
    present,
)


class PrefixMatch(NamedTuple):
    """The longest cached prefix from which a request can continue: its tokens, in whole pages.

    Attributes:
        shared: [full tables, n], pages of the longest prefix that is cached in full tables.
        state: pages of the recurrent state after these tokens, if layers have one. Read-only.
    """

    num_tokens: int
    holding: PageHolding
    shared: Ints
    state: Ints = NO_STATE

    @property
    def pages(self) -> Ints:
        """All distinct pages that a request needs to continue from this match."""
        return np.concatenate((self.holding.flat(), self.state))


class LowerTier(Protocol):
    """An offload tier, which keeps pages evicted from the tree. It identifies pages by key and
    name, see RadixNode."""

    def pages_added(self, node: RadixNode) -> None:
        """Record that the tree has the pages of this node and of all nodes above."""
        ...

    def pages_evicted(self, keys: Sequence[PageKey], names: Sequence[int]) -> Iterable[int]:
        """Record that the tree has evicted pages. Return the names of the pages that no tier has
        either."""
        ...

    def forget(self, keys: Collection[PageKey]) -> None:
        """Remove these pages, which are not in the tree any more."""
        ...

    def clear(self) -> None: ...

    def names(self) -> Iterable[int]:
        """Return the names of all pages in the tier."""
        ...

    def record_in(self, journal: CacheRecorder | None) -> None:
        """Record in `journal`, from now on, every page that is no longer in any tier."""
        ...


class PrefixCache:
    """Pages of KV by the tokens they hold. Engine thread only.

    Source: RadixAttention, Zheng et al. 2024, section 3.

    Args:
        windows, state_pages: see PageTables.
        max_pages: size limit that `trim` applies. 0: no limit.
    """

    def __init__(
        self,
        page_size: int,
        pages: PageAllocator,
        windows: tuple[int | None, ...] = (None,),
        state_pages: int = 0,
        *,
        enabled: bool = True,
        max_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self._max_pages = max_pages
        self._trimmed_at = -1  # num_released of the pool when `trim` last failed to evict enough
        self.enabled = enabled
        self._full = [window is None for window in windows]
        self._pool = pages
        self._pages = TreePages(pages, has_gaps=not all(self._full))
        self._windows = TreeWindows(PageTables(page_size, windows), self._pages)
        self._states = TreeStates(state_pages, self._pages, pages)
        self._no_pages = np.empty((len(windows), 0), np.int32)
        self._no_match = PrefixMatch(0, PageHolding(self._no_pages), self._no_pages[self._full])
        self._root = RadixNode(0, b"", np.empty(0, np.int32), self._no_pages, None)
        self._leaves: list[tuple[int, int, RadixNode]] = []  # heap by time of last use when pushed
        self._clock = 0
        self._numbers = 0
        self._journal: CacheRecorder | None = None
        self._below: LowerTier | None = None

    def keep_below(self, below: LowerTier) -> None:
        """Report pages inserted from now on to the offload tier `below`. The tree must be empty."""
        self._below = below

    @property
    def num_pages(self) -> int:
        """Number of pages in the tree."""
        return self._pages.num_held

    def match(self, token_ids: Ints, namespace: Namespace = SHARED) -> PrefixMatch:
        """Return the longest cached prefix in the namespace, in whole pages, and mark it as used.

        The caller must hold the pages before the next eviction. Does not change the pages of any
        node. O(len(token_ids)).
        """
        self._clock += 1
        found: list[Ints] = [self._no_pages]
        path: list[tuple[RadixNode, int]] = []  # each node with its start, in pages
        num_pages = 0
        for node, common in self._path(token_ids, namespace):
            node.last_used = self._clock
            found.append(node.pages[:, :common])
            path.append((node, num_pages))
            num_pages += common
        if not path:
            return self._no_match
        pages = np.concatenate(found, axis=1)
        shared = pages[self._full]
        state = NO_STATE
        if self._windows or self._states:
            num_pages, state = self._last_resumable(path, pages)
            _note_resumed(path, num_pages)
            pages = self._windows.within(pages[:, :num_pages], num_pages)
        return PrefixMatch(num_pages * self.page_size, PageHolding(pages), shared, state)

    def _last_resumable(self, path: list[tuple[RadixNode, int]], pages: Ints) -> tuple[int, Ints]:
        """Return the largest number of a path's pages [tables, n] after which a request can
        continue, and the state at that point."""
        num_pages, state = pages.shape[1], NO_STATE
        while True:
            if self._states:
                num_pages, state = self._states.deepest(path, num_pages)
            within = last_within(self._windows.tables, pages[:, :num_pages])
            if within == num_pages:
                return num_pages, state
            num_pages = within

    def lineage(self, token_ids: Ints, namespace: Namespace = SHARED) -> tuple[int, ...]:
        """Return the numbers of the tree's nodes along the longest cached prefix, from the root
        down."""
        return tuple(node.number for node, _ in self._path(token_ids, namespace))

    def keys(self, token_ids: Ints, namespace: Namespace = SHARED) -> list[PageKey]:
        """Return the keys of the pages of the longest cached prefix. Only valid with an offload
        tier."""
        path = self._path(token_ids, namespace)
        return [key for node, common in path for key in node.keys[:common]]

    def insert(
        self,
        token_ids: Ints,
        holding: PageHolding,
        namespace: Namespace = SHARED,
        *,
        state: Ints = NO_STATE,
    ) -> None:
        """Insert the whole pages of `token_ids`: all pages of full tables, and in other tables the
        pages inside the window at the end.

        Holds each added page for CACHE. Pages that the tree already has for the same tokens stay.
        All arguments are copied.

        Args:
            state: pages of the state after all of `token_ids`, which must be whole pages. The tree
                holds them, too.
        """
        num_pages = len(token_ids) // self.page_size
        if not self.enabled or not num_pages:
            return
        if holding.num_pages < num_pages:
            raise EngineFault(f"{len(token_ids)} tokens are not in {holding.num_pages} pages")
        # Include the window one page earlier, because a repeated prompt continues one token before
        # its end.
        pages = self._windows.within(holding.tables[:, :num_pages], num_pages - 1)
        self._clock += 1
        end = num_pages * self.page_size
        node, done = self._root, 0
        for child, common in self._path(token_ids[:end], namespace):
            child.last_used = self._clock
            self._windows.fill(child, pages[:, done : done + common])
            done += common
            node = child if common == child.num_pages else self._split(child, common)
        if done < num_pages:
            rest = pages[:, done:].copy()
            self._pages.hold(rest)
            fresh = token_ids[done * self.page_size : end].copy()
            key = (b"" if done else namespace) + self._key(fresh)
            node = self._add_child(node, key, fresh, rest)
            self._name(node, namespace, token_ids[: done * self.page_size])
        self._states.add(node, state)
        if self._below is not None:
            self._below.pages_added(node)

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages`, or all evictable pages. Return the number of freed pages.

        Eviction order: first, windows and states from which no request continued and that a longer
        prefix made obsolete. Next, the ends of least recently used leaves, and states of nodes in
        use. A page that only the tree holds may be above one that is in use. It is freed last. The
        tree then drops everything below it, because no request can use a prefix without its
        beginning.
        """
        freed = self._evict_oldest(num_pages)
        if freed < num_pages and self._pool.num_evictable:
            freed += self._cut_off()
        return freed

    def trim(self) -> None:
        """Evict the pages beyond the size limit, except pages in use and pages above them.

        Call it once per turn of the loop. O(evicted pages), plus O(leaves in use) if pages became
        free or evictable since the last call.
        """
        if not self._max_pages:
            return
        excess = min(self.num_pages - self._max_pages, self._pool.num_evictable)
        if excess <= 0 or self._trimmed_at == self._pool.num_released:
            return
        enough = self._evict_oldest(excess) >= excess
        self._trimmed_at = -1 if enough else self._pool.num_released

    @property
    def num_available(self) -> int:
        """Return the number of pages that `allocate` can return."""
        return self._pool.num_available

    def allocate(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate as PageAllocator.allocate does, evicting if needed. Evicts nothing if it
        fails."""
        short = num_pages - self._pool.num_free
        if short > self._pool.num_evictable:
            return None
        if short > 0:
            self.evict(short)
        return self._pool.allocate(num_pages, holder)

    def forget(self, token_ids: Ints, namespace: Namespace = SHARED) -> None:
        """Remove everything that begins with the first page of these tokens, also in the offload
        tier.

        Holders of such pages keep them, and may insert them again once a forward has computed
        finite logits from them.
        """
        keys: set[PageKey] = set()
        if self._below is not None:  # which may have more of the prefix than the tree
            keys.update(page_keys(namespace, token_ids, self.page_size))
        first = self._root.children.get(namespace + self._key(token_ids))
        if first is not None:
            keys.update(key for node in (first, *first.below()) for key in node.keys)
            self._remove(first)
        if self._below is not None:
            self._below.forget(keys)

    def flush(self) -> int:
        """Remove everything, also in the offload tier. Return the number of freed pages."""
        before = self._pool.num_free
        if self._below is not None:
            self._below.clear()
        for child in list(self._root.children.values()):
            self._remove(child)
        self._leaves.clear()
        self._windows.clear()
        self._states.clear()
        return self._pool.num_free - before

    def record_in(self, journal: CacheRecorder | None) -> None:
        """Record every change from now on in `journal`. O(pages in the tree)."""
        self._journal = journal
        if self._below is not None:
            self._below.record_in(journal)
        if journal is None:
            return
        nodes = [(n, PrefixHasher(self._namespace(n))) for n in self._root.children.values()]
        while nodes:
            node, hasher = nodes.pop()
            node.names = hasher.extend(node.tokens.tobytes(), self.page_size)
            nodes += [(child, hasher.copy()) for child in node.children.values()]

    def runs(self) -> Iterator[StoredRun]:
        """Yield the pages of every node, parents first. Only valid with a journal."""
        nodes = [(n, self._namespace(n)) for n in self._root.children.values()]
        while nodes:
            node, namespace = nodes.pop()
            yield _run(node, namespace)
            nodes += [(child, namespace) for child in node.children.values()]

    def page_names(self) -> list[int]:
        """Return the names of all pages in the tree or the offload tier. Only valid with a
        journal."""
        names = {name for node in self._root.below() for name in node.names}
        return [*names.union(self._below.names() if self._below is not None else ())]

    def check(self) -> None:
        """Raise EngineFault if the tree and the page counts are inconsistent. O(pages in the
        tree)."""
        nodes = list(self._root.below())
        in_tree = [page for node in nodes for page in present(node.pages).tolist()]
        in_tree += [page for node in nodes for page in node.state.tolist()]
        held = np.flatnonzero(self._pool.holds(PageHolder.CACHE)).tolist()
        if sorted(in_tree) != held or len(in_tree) != self.num_pages:
            raise EngineFault(
                f"cache: {len(in_tree)} pages in the tree, {self.num_pages} counted, "
                f"{len(held)} held"
            )
        for node in nodes:
            num_pages = node.num_pages
            if len(node.tokens) != num_pages * self.page_size or not num_pages:
                raise EngineFault(f"cache: node {node.number} has {num_pages} pages")
            if (node.pages[self._full] < 0).any():
                raise EngineFault(f"cache: node {node.number} lacks a page of a full table")
        for node in (self._root, *nodes):
            for key, child in node.children.items():
                found = child.parent is node and child.key == key
                if not found or not key.endswith(self._key(child.tokens)):
                    raise EngineFault(f"cache: node {child.number} hangs in the wrong place")

    def _path(self, token_ids: Ints, namespace: Namespace) -> Iterator[tuple[RadixNode, int]]:
        """Yield each node along the longest match, with the number of its pages that match (never
        0)."""
        size = self.page_size
        node, at, end = self._root, 0, len(token_ids) // size * size
        while at < end:
            child = node.children.get(namespace + self._key(token_ids[at:]))
            if child is None:
                return
            length = min(len(child.tokens), end - at)
            differs = child.tokens[:length] != token_ids[at : at + length]
            first = int(differs.argmax())
            common = (first if differs[first] else length) // size
            whole = common == child.num_pages
            yield child, common  # the caller may split it
            if not whole:
                return
            node, at = child, at + common * size
            namespace = b""  # keys below the root's children have no namespace

    def _key(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _namespace(self, first: RadixNode) -> Namespace:
        """Return the namespace of a child of the root."""
        return first.key[: -self.page_size * BYTES_PER_TOKEN]

    def _add_child(self, parent: RadixNode, key: bytes, tokens: Ints, pages: Ints) -> RadixNode:
        self._numbers += 1
        node = RadixNode(self._numbers, key, tokens, pages, parent)
        node.last_used = self._clock
        parent.children[key] = node
        self._queue(node)
        self._windows.note_passed(parent)
        return node

    def _name(self, node: RadixNode, namespace: Namespace, above: Ints) -> None:
        """Set the keys and names of a node that was added after these tokens, if they are used."""
        if self._below is not None:
            last = node.parent.keys[-1] if node.parent and node.parent.keys else namespace
            node.keys = [*page_keys(last, node.tokens, self.page_size)]
        if self._below is not None or self._journal is not None:
            hasher = PrefixHasher(namespace + above.tobytes())
            node.names = hasher.extend(node.tokens.tobytes(), self.page_size)
        if self._journal is not None:
            self._journal.stored(_run(node, namespace))

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Move the first pages of `node` into a new node above it. Return the new node."""
        assert node.parent is not None
        cut = num_pages * self.page_size
        upper = self._add_child(node.parent, node.key, node.tokens[:cut], node.pages[:, :num_pages])
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[:, num_pages:], upper
        upper.resumed = node.resumed
        upper.names, node.names = node.names[:num_pages], node.names[num_pages:]
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        upper.settled_at = node.settled_at
        upper.num_saved = min(node.num_saved, num_pages)
        node.num_saved -= upper.num_saved
        node.key = self._key(node.tokens)
        upper.children[node.key] = node
        self._windows.note_passed(upper)
        return upper

    def _queue(self, node: RadixNode) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.last_used, node.number, node))

    def _evict_oldest(self, num_pages: int) -> int:
        """Evict as `evict` does, except pages above a page in use."""
        freed = self._windows.thin(num_pages)
        freed += self._states.thin(num_pages - freed)
        freed += self._evict_leaves(num_pages - freed)
        if freed < num_pages:
            freed += self._states.drop_oldest(num_pages - freed)
        return freed

    def _evict_leaves(self, num_pages: int) -> int:
        freed = 0
        in_use: list[RadixNode] = []
        while freed < num_pages and self._pool.num_evictable and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children or node.parent is None:
                continue  # removed, or not a leaf any more
            if node.last_used != used:
                self._queue(node)
                continue
            loose = self._pages.loose_at_end(node)
            if not loose:
                in_use.append(node)
                continue
            freed += self._states.drop(node)
            count, num_freed = self._last_pages(node, loose, num_pages - freed)
            self._shorten(node, node.num_pages - count)
            freed += num_freed
        self._clock += 1
        for node in in_use:  # the last page of these leaves is held
            node.last_used = self._clock
            self._queue(node)
        return freed

    def _last_pages(self, leaf: RadixNode, loose: int, num_pages: int) -> tuple[int, int]:
        """Return how many of a leaf's last `loose` pages to remove, and how many pages of all
        tables that frees: `num_pages`, if there are as many."""
        if not self._windows:
            num_tables = len(leaf.pages)
            count = min(loose, -(-num_pages // num_tables))
            return count, count * num_tables
        from_end = np.cumsum((leaf.pages[:, -loose:] >= 0).sum(axis=0)[::-1])
        count = min(loose, int(from_end.searchsorted(num_pages)) + 1)
        return count, int(from_end[count - 1])

    def _shorten(self, leaf: RadixNode, num_pages: int) -> None:
        """Shorten a leaf to `num_pages`, and remove its state. A leaf without pages is removed."""
        parent = leaf.parent
        assert parent is not None
        self._states.drop(leaf)
        self._pages.release(leaf.pages[:, num_pages:])
        self._record_removed(leaf, num_pages)
        if num_pages:
            leaf.tokens, leaf.pages = (
                leaf.tokens[: num_pages * self.page_size],
                leaf.pages[:, :num_pages],
            )
            self._queue(leaf)
            return
        del parent.children[leaf.key]
        leaf.parent = None
        if not parent.children and parent is not self._root:
            self._queue(parent)

    def _record_removed(self, leaf: RadixNode, num_pages: int) -> None:
        if self._below is None and self._journal is None:
            return
        lost: Iterable[int] = leaf.names[num_pages:]
        if self._below is not None:
            lost = self._below.pages_evicted(leaf.keys[num_pages:], leaf.names[num_pages:])
        if self._journal is not None:
            self._journal.removed(lost)
        del leaf.names[num_pages:], leaf.keys[num_pages:]
        leaf.num_saved = min(leaf.num_saved, num_pages)

    def _cut_off(self) -> int:
        """Free every page that only the tree holds, anywhere in the tree."""
        before = self._pool.num_free
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            alone = self._pages.alone(node)
            self._windows.drop(node, alone)
            self._states.drop(node)
            cut = alone[self._full].any(axis=0)
            if cut.any():
                for child in list(node.children.values()):
                    self._remove(child)
                self._shorten(node, int(cut.argmax()))
            else:
                nodes.extend(node.children.values())
        return self._pool.num_free - before

    def _remove(self, node: RadixNode) -> None:
        """Remove a node and all nodes below it from the tree."""
        for gone in reversed([node, *node.below()]):
            self._shorten(gone, 0)


def _run(node: RadixNode, namespace: Namespace) -> StoredRun:
    assert node.parent is not None
    above = node.parent.names[-1:]  # the root has none
    return StoredRun(node.names, node.tokens, above[0] if above else None, namespace)


def _note_resumed(path: list[tuple[RadixNode, int]], num_pages: int) -> None:
    """Mark the node in which a request continues after `num_pages` pages. The path has each node
    with its start."""
    for node, start in path:
        if start < num_pages <= start + node.num_pages:
            node.resumed = True
