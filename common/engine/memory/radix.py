"""The prefix cache: a radix tree over token ids, in whole pages.

Namespaces part at the root: a branch that begins there is found by its namespace and its first page
of tokens. They share the clock, so that what was used longest ago goes first, whosesoever it is.
The tree has no locks of its own. Whoever uses a match holds its pages; what only the tree holds
may be evicted. It learns of pages when their KV is final and knows nothing of requests.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.engine.memory.cache_events import CacheJournal
from common.engine.memory.pages import Holder, PageAllocator
from common.engine.rows.batch import Ints
from common.errors import EngineFault
from common.requests.namespace import SHARED, Namespace
from common.requests.prefix_hash import BYTES_PER_TOKEN, PrefixHasher


class Match(NamedTuple):
    """The longest cached prefix; `num_tokens` is len(pages) * page_size."""

    num_tokens: int
    pages: Ints


class _Node:
    """A run of pages without a branch. Its children begin with different pages of tokens."""

    __slots__ = (
        "children",
        "key",
        "last_used",
        "names",
        "number",
        "pages",
        "parent",
        "queued",
        "tokens",
    )

    def __init__(
        self, number: int, key: bytes, tokens: Ints, pages: Ints, parent: "_Node | None"
    ) -> None:
        self.number = number
        # Among its parent's children: its first page of tokens, and below the root, before that,
        # its namespace.
        self.key = key
        self.tokens = tokens  # [len(pages) * page_size]
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.last_used = 0
        self.queued = False  # it has an entry in the heap of leaves
        # Of its pages, as prefix_hash.py names them; kept while the tree has a journal.
        self.names: list[int] = []


class RadixCache:
    """Pages of KV by the tokens they hold. Engine thread only.

    Source: RadixAttention, Zheng et al. 2024, section 3.
    """

    def __init__(self, page_size: int, pages: PageAllocator, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self._pages = pages
        self.enabled = enabled
        self._root = _Node(0, b"", np.empty(0, np.int32), np.empty(0, np.int32), None)
        self._leaves: list[tuple[int, int, _Node]] = []  # heap by last use, as it was when pushed
        self._clock = 0
        self._numbers = 0
        self._journal: CacheJournal | None = None
        self.num_pages = 0

    def match(self, token_ids: Ints, namespace: Namespace = SHARED) -> Match:
        """Finds the longest cached prefix of the namespace, in whole pages; it is used now.

        The caller holds the pages before anything else may evict. Changes no node.
        O(len(token_ids)).
        """
        self._clock += 1
        found: list[Ints] = []
        num_pages = 0
        for node, common in self._path(token_ids, namespace):
            node.last_used = self._clock
            found.append(node.pages[:common])
            num_pages += common
        pages = np.concatenate(found) if found else np.empty(0, np.int32)
        return Match(num_pages * self.page_size, pages)

    def lineage(self, token_ids: Ints, namespace: Namespace = SHARED) -> tuple[int, ...]:
        """Numbers of the tree's nodes along the longest cached prefix, the root's child first."""
        return tuple(node.number for node, _ in self._path(token_ids, namespace))

    def insert(self, token_ids: Ints, pages: Ints, namespace: Namespace = SHARED) -> None:
        """Learns the whole pages of `token_ids`; pages[i] holds token indices from i * page_size.

        Holds each page that it adds for CACHE. What it has under other page numbers stays as it
        is, and the caller's duplicates are ignored. Both arrays are copied.
        """
        num_pages = len(token_ids) // self.page_size
        if not self.enabled or not num_pages:
            return
        if len(pages) < num_pages:
            raise EngineFault(f"{len(token_ids)} tokens are not in {len(pages)} pages")
        self._clock += 1
        end = num_pages * self.page_size
        node, done = self._root, 0
        for child, common in self._path(token_ids[:end], namespace):
            child.last_used = self._clock
            done += common
            node = child if common == len(child.pages) else self._split(child, common)
        if done == num_pages:
            return
        rest = pages[done:num_pages].copy()
        self._pages.hold(rest, Holder.CACHE)
        fresh = token_ids[done * self.page_size : end].copy()
        added = self._add_child(node, (b"" if done else namespace) + self._key(fresh), fresh, rest)
        self.num_pages += len(rest)
        if self._journal is not None:
            above = PrefixHasher(namespace + token_ids[: done * self.page_size].tobytes())
            added.names = above.extend(added.tokens.tobytes(), self.page_size)
            self._journal.stored(added.names)

    def evict(self, num_pages: int) -> int:
        """Frees at least `num_pages`, or all that are evictable; returns how many it freed.

        Least recently used leaves first, from their ends. A page that only the tree holds may sit
        above one that is in use: when nothing else is left, it goes, and the tree forgets the part
        below it.
        """
        freed = self._evict_leaves(num_pages)
        if freed < num_pages and self._pages.num_evictable:
            freed += self._cut_off()
        return freed

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones and those that only the tree holds."""
        return self._pages.num_free + self._pages.num_evictable

    def allocate(self, num_pages: int, holder: Holder) -> Ints | None:
        """As PageAllocator.allocate, evicting as needed; nothing is evicted in vain."""
        short = num_pages - self._pages.num_free
        if short > self._pages.num_evictable:
            return None
        if short > 0:
            self.evict(short)
        return self._pages.allocate(num_pages, holder)

    def flush(self) -> int:
        """Forgets everything; returns how many pages became free."""
        before = self._pages.num_free
        for child in list(self._root.children.values()):
            self._forget(child)
        self._leaves.clear()
        return self._pages.num_free - before

    def tell(self, journal: CacheJournal | None) -> None:
        """From now on every page that comes or goes is told to `journal`. O(pages in the tree)."""
        self._journal = journal
        if journal is None:
            return
        page_bytes = self.page_size * BYTES_PER_TOKEN
        nodes = [(n, PrefixHasher(n.key[:-page_bytes])) for n in self._root.children.values()]
        while nodes:
            node, hasher = nodes.pop()
            node.names = hasher.extend(node.tokens.tobytes(), self.page_size)
            nodes += [(child, hasher.copy()) for child in node.children.values()]

    def page_names(self) -> list[int]:
        """Of every page in the tree; only while there is a journal."""
        return [name for node in self._below(self._root) for name in node.names]

    def check(self) -> None:
        """Raises EngineFault where the tree and the page counts disagree. O(pages in the tree)."""
        nodes = list(self._below(self._root))
        in_tree = [page for node in nodes for page in node.pages.tolist()]
        held = np.flatnonzero(self._pages.holds(Holder.CACHE)).tolist()
        if sorted(in_tree) != held or len(in_tree) != self.num_pages:
            raise EngineFault(
                f"cache: {len(in_tree)} pages in the tree, {self.num_pages} counted, "
                f"{len(held)} held"
            )
        for node in nodes:
            if len(node.tokens) != len(node.pages) * self.page_size or not len(node.pages):
                raise EngineFault(f"cache: node {node.number} has {len(node.pages)} pages")
        for node in (self._root, *nodes):
            for key, child in node.children.items():
                found = child.parent is node and child.key == key
                if not found or not key.endswith(self._key(child.tokens)):
                    raise EngineFault(f"cache: node {child.number} hangs in the wrong place")

    def _path(self, token_ids: Ints, namespace: Namespace) -> Iterator[tuple[_Node, int]]:
        """Each node along the longest match, and how many of its pages match (never 0)."""
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
            whole = common == len(child.pages)
            yield child, common  # the caller may split it
            if not whole:
                return
            node, at = child, at + common * size
            namespace = b""  # no part of a key below

    def _key(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _add_child(self, parent: _Node, key: bytes, tokens: Ints, pages: Ints) -> _Node:
        self._numbers += 1
        node = _Node(self._numbers, key, tokens, pages, parent)
        node.last_used = self._clock
        parent.children[key] = node
        self._queue(node)
        return node

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Puts the first pages of `node` into a new node above it, which is returned."""
        assert node.parent is not None
        cut = num_pages * self.page_size
        upper = self._add_child(node.parent, node.key, node.tokens[:cut], node.pages[:num_pages])
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[num_pages:], upper
        upper.names, node.names = node.names[:num_pages], node.names[num_pages:]
        node.key = self._key(node.tokens)
        upper.children[node.key] = node
        return upper

    def _queue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.last_used, node.number, node))

    def _evict_leaves(self, num_pages: int) -> int:
        freed = 0
        in_use: list[_Node] = []
        while freed < num_pages and self._pages.num_evictable and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children or node.parent is None:
                continue  # not a leaf any more, or gone
            if node.last_used != used:
                self._queue(node)
                continue
            alone = self._pages.held_only_by(node.pages, Holder.CACHE)[::-1]
            loose = len(alone) if alone.all() else int(alone.argmin())
            if not loose:
                in_use.append(node)
                continue
            count = min(loose, num_pages - freed)
            self._trim(node, len(node.pages) - count)
            freed += count
        self._clock += 1
        for node in in_use:  # somebody holds its last page: it is being used now
            node.last_used = self._clock
            self._queue(node)
        return freed

    def _trim(self, leaf: _Node, num_pages: int) -> None:
        """Leaves the first `num_pages` of a leaf; a leaf without pages goes."""
        parent = leaf.parent
        assert parent is not None
        gone = leaf.pages[num_pages:]
        self.num_pages -= len(gone)
        self._pages.drop(gone, Holder.CACHE)
        if self._journal is not None:
            self._journal.removed(leaf.names[num_pages:])
            del leaf.names[num_pages:]
        if num_pages:
            leaf.tokens, leaf.pages = (
                leaf.tokens[: num_pages * self.page_size],
                leaf.pages[:num_pages],
            )
            self._queue(leaf)
            return
        del parent.children[leaf.key]
        leaf.parent = None
        if not parent.children and parent is not self._root:
            self._queue(parent)

    def _cut_off(self) -> int:
        """Frees every page that only the tree holds, wherever it sits."""
        before = self._pages.num_free
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            alone = self._pages.held_only_by(node.pages, Holder.CACHE)
            if alone.any():
                for child in list(node.children.values()):
                    self._forget(child)
                self._trim(node, int(alone.argmax()))
            else:
                nodes.extend(node.children.values())
        return self._pages.num_free - before

    def _forget(self, node: _Node) -> None:
        """Takes a node and all below it out of the tree."""
        for gone in reversed([node, *self._below(node)]):
            self._trim(gone, 0)

    def _below(self, node: _Node) -> Iterator[_Node]:
        """Every node below, parents before children."""
        nodes = list(node.children.values())
        while nodes:
            below = nodes.pop()
            yield below
            nodes.extend(below.children.values())
