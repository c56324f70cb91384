"""The nodes of the prefix tree, and the pages, windows and recurrent states that it keeps.

Offload tiers find a page by key, a 128-bit hash of the namespace and of all tokens up to the page's
end. The lookup does not compare tokens. The hash is therefore cryptographic, unlike the page names
that are reported to routers (common/requests/namespace.py).

Windows: the tree keeps the pages before each end from which a request continued, or may continue.
Pages that a longer prefix made obsolete are evicted first.

Recurrent states: a state is always at a node's end, since a prefix inserted with a state ends
there. It is as large as the KV of many tokens. States from which no request continued, and that are
followed by a deeper one, are therefore evicted first.

A state is kept at the last page boundary that is at least one token before a prompt's end. The same
prompt can continue from there if it is repeated. Another state is kept where the prompt branches
off a cached one, since more prompts with that common prefix are likely. A chunk ends at such a
branch instead of passing it.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.page_tables import PageTables
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE, ZERO
from engine.kv_cache.pages import PageAllocator, PageHolder

KEY_BYTES = 16
PageKey = bytes
NO_STATE = np.empty(0, np.int32)


def page_keys(above: bytes, token_ids: Ints, page_size: int) -> Iterator[PageKey]:
    """Yield the key of each whole page of these tokens, computed on demand.

    Args:
        above: key of the previous page, or the namespace for a prompt's first page.
    """
    packed, size = token_ids.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(0, len(packed) - size + 1, size):
        page = above + packed[start : start + size]
        above = blake2b(page, digest_size=KEY_BYTES, person=b"baton page of KV").digest()
        yield above


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of pages without a branch. The first pages of its children differ in their tokens.

    Attributes:
        key: key in its parent's dict of children: its first page of tokens, preceded by the
            namespace directly below the root.
        tokens: [pages.shape[1] * page_size].
        pages: [tables, any], NO_PAGE where no window is kept.
        parent: None: it is the root, or removed.
        queued: whether it has an entry in the heap of leaves.
        passed: whether it is in the queue of nodes that have a child.
        resumed: whether a request continued from within it.
        state: pages of the state at its end, if one is kept.
        names: names of its pages (namespace.py), set while the tree has a journal or an offload
            tier.
        keys: keys of its pages, set while the tree has an offload tier.
        num_saved, settled_at: set by the offload tier: number of its first pages that are
            completely saved there, and the time of that check.
    """

    number: int
    key: bytes
    tokens: Ints
    pages: Ints
    parent: "RadixNode | None"
    children: dict[bytes, "RadixNode"] = field(default_factory=dict)
    last_used: int = 0
    queued: bool = False
    passed: bool = False
    resumed: bool = False
    state: Ints = field(default_factory=lambda: NO_STATE)
    names: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    num_saved: int = 0
    settled_at: float = -math.inf

    @property
    def num_pages(self) -> int:
        """Number of pages in each table."""
        num_pages: int = self.pages.shape[1]
        return num_pages

    def above(self) -> Iterator["RadixNode"]:
        """Yield every node above except the root, nearest first."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator["RadixNode"]:
        """Yield every node below, parents before children."""
        nodes = list(self.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())


class TreePages:
    """The tree's holds in the pool, and its pages that have no other holder.

    Args:
        has_gaps: whether entries may be NO_PAGE, because there are windows.
    """

    def __init__(self, pool: PageAllocator, *, has_gaps: bool) -> None:
        self._pool = pool
        self._present = present if has_gaps else np.ndarray.ravel
        self.num_held = 0

    def hold(self, pages: Ints) -> None:
        """Add a CACHE hold on pages."""
        there = self._present(pages)
        self._pool.hold(there, PageHolder.CACHE)
        self.num_held += len(there)

    def release(self, pages: Ints) -> None:
        there = self._present(pages)
        self.num_held -= len(there)
        self._pool.drop(there, PageHolder.CACHE)

    def alone(self, node: RadixNode) -> NDArray[np.bool_]:
        """Return a mask of the pages that only the tree holds: [tables, n]."""
        unused = self._pool.unused(node.pages.ravel())
        return unused.reshape(node.pages.shape) & (node.pages >= ZERO)

    def loose_at_end(self, node: RadixNode) -> int:
        """Return the number of pages at the node's end that have no other holder in any table."""
        unused = self._pool.unused(node.pages.ravel())
        if np.count_nonzero(unused) == unused.size:
            return node.num_pages
        in_use = (~unused.reshape(node.pages.shape) & (node.pages >= ZERO)).any(axis=0)
        (held,) = np.nonzero(in_use)
        return node.num_pages - (int(held[-1]) + 1 if len(held) else 0)


def present(pages: Ints) -> Ints:
    """Return the pages that are not NO_PAGE."""
    return pages[pages >= ZERO]


class TreeWindows:
    """The pages that the tree keeps in tables with windows. Engine thread only."""

    def __init__(self, tables: PageTables, pages: TreePages) -> None:
        self.tables = tables
        self._sliding = tables.sliding
        self._has_window = np.array([[window is not None] for window in tables.windows])
        self._pages = pages
        self._passed: deque[RadixNode] = deque()  # nodes with a child, to be checked

    def __bool__(self) -> bool:
        return bool(self._sliding)

    def within(self, pages: Ints, num_pages: int) -> Ints:
        """Return pages [tables, n] with NO_PAGE outside the windows after `num_pages` pages.
        Returns a copy, or `pages` itself if there are no windows."""
        if not self._sliding:
            return pages
        kept = pages.copy()
        num_tokens = num_pages * self.tables.page_size
        for table, _ in self._sliding:
            kept[table, : self.tables.live_from(table, num_tokens)] = NO_PAGE
        return kept

    def note_passed(self, node: RadixNode) -> None:
        """Record that the node has a child: its own windows may be obsolete."""
        if self._sliding and node.parent is not None and not node.passed:
            node.passed = True
            self._passed.append(node)

    def fill(self, node: RadixNode, pages: Ints) -> None:
        """Add pages that the node lacks among its first pages."""
        if self._sliding:
            mine = node.pages[:, : pages.shape[1]]
            new = np.where(mine < 0, pages, NO_PAGE)
            self._pages.hold(new)
            np.copyto(mine, new, where=new >= 0)
            if (new >= 0).any():
                node.num_saved = 0

    def thin(self, num_pages: int) -> int:
        """Free obsolete windows of nodes with a child until `num_pages` are free. Return the number
        of freed pages."""
        freed = 0
        for _ in range(len(self._passed)):
            if freed >= num_pages:
                break
            node = self._passed.popleft()
            node.passed = False
            if node.parent is not None and node.children:
                freed += self._thin(node)
        return freed

    def drop(self, node: RadixNode, which: NDArray[np.bool_]) -> int:
        """Release a node's pages in tables with windows where `which` [tables, pages] is true.
        Return the number of freed pages."""
        which = which & self._has_window
        gone = node.pages[which]
        if len(gone):
            self._pages.release(gone)
            node.pages[which] = NO_PAGE
        return len(gone)

    def clear(self) -> None:
        """Record that the tree is empty."""
        self._passed.clear()

    def _thin(self, node: RadixNode) -> int:
        """Free the obsolete windows of a node, except pages with other holders, which are checked
        again later. Return the number of freed pages."""
        below = _tokens_to_next_end(node)
        spare = np.zeros(node.pages.shape, np.bool_)
        for table, window in self._sliding:
            needed = max(0, window + self.tables.page_size - below)
            num_spare = max(0, len(node.tokens) - needed) // self.tables.page_size
            spare[table, :num_spare] = True
        spare &= node.pages >= 0
        alone = self._pages.alone(node)
        if (spare & ~alone).any():
            self.note_passed(node)
        return self.drop(node, spare & alone)


def last_within(tables: PageTables, pages: Ints) -> int:
    """Return the largest number of pages, at most n, after which all pages inside the windows are
    present.

    Args:
        pages: [tables, n], NO_PAGE where absent.
    """
    ends = np.arange(pages.shape[1] + 1)
    whole = np.ones(len(ends), np.bool_)
    for table, window in tables.sliding:
        lacking = np.concatenate(([0], np.cumsum(pages[table] < 0)))
        firsts = np.maximum(ends * tables.page_size - window + 1, 0)
        whole &= lacking == lacking[firsts // tables.page_size]
    return int(np.flatnonzero(whole)[-1])


def _tokens_to_next_end(node: RadixNode) -> int:
    """Return the tokens from a node's end to the first end below it from which a request continued
    or may continue: a branch, or a leaf's end."""
    num_tokens = 0
    while len(node.children) == 1 and not node.resumed:
        (node,) = node.children.values()
        num_tokens += len(node.tokens)
    return num_tokens


class TreeStates:
    """The recurrent states in the tree. Engine thread only. Does nothing for models without
    states."""

    def __init__(self, state_pages: int, pages: TreePages, pool: PageAllocator) -> None:
        self._state_pages = state_pages
        self._pages = pages
        self._pool = pool
        self._having: dict[RadixNode, None] = {}  # nodes with a state
        # Nodes with a state that is followed by a deeper one.
        self._passed: deque[RadixNode] = deque()

    def __bool__(self) -> bool:
        return self._state_pages > 0

    def deepest(self, path: list[tuple[RadixNode, int]], num_pages: int) -> tuple[int, Ints]:
        """Return the last position on a path, at most `num_pages`, at which a request can continue,
        and its state. Position 0 needs no state.

        Args:
            path: nodes with their starts, in pages.
        """
        for node, start in reversed(path):
            if len(node.state) and start + node.num_pages <= num_pages:
                return start + node.num_pages, node.state
        return 0, NO_STATE

    def add(self, node: RadixNode, state: Ints) -> None:
        """Hold a state at the node's end, unless there already is one."""
        if len(node.state) or not len(state):
            return
        node.state = state.copy()
        node.num_saved = min(node.num_saved, node.num_pages - 1)
        self._pages.hold(node.state)
        self._having[node] = None
        above = node.parent
        while above is not None and not len(above.state):
            above = above.parent
        if above is not None:
            self._passed.append(above)

    def drop(self, node: RadixNode) -> int:
        """Release the node's state, if any. Return the number of freed pages."""
        state, node.state = node.state, NO_STATE
        if not len(state):
            return 0
        before = self._pool.num_free
        self._pages.release(state)
        del self._having[node]
        return self._pool.num_free - before

    def clear(self) -> None:
        """Record that the tree is empty."""
        self._passed.clear()

    def thin(self, num_pages: int) -> int:
        """Free states from which no request continued and that are followed by a deeper one, until
        `num_pages` are free. Return the number of freed pages."""
        freed = 0
        for _ in range(len(self._passed)):
            if freed >= num_pages:
                break
            node = self._passed.popleft()
            if node.resumed or not len(node.state):
                continue
            if self._alone(node):
                freed += self.drop(node)
            else:
                self._passed.append(node)
        return freed

    def drop_oldest(self, num_pages: int) -> int:
        """Free any states, least recently used first, until `num_pages` are free. Return the number
        of freed pages."""
        freed = 0
        for node in sorted(self._having, key=lambda node: node.last_used):
            if freed >= num_pages:
                break
            if self._alone(node):
                freed += self.drop(node)
        return freed

    def _alone(self, node: RadixNode) -> bool:
        return bool(self._pool.unused(node.state).all())


class ChunkRange(NamedTuple):
    """One chunk of a prompt, which ends at `end`. The state after token `keep` is kept. 0: none is
    kept."""

    end: int
    keep: int


def stretch(start: int, end: int, *, num_tokens: int, branch: int, page_size: int) -> ChunkRange:
    """Return where the next chunk of a prompt ends and which state it keeps.

    Args:
        start, end: token indices that would be computed next.
        num_tokens: length of the whole prompt.
        branch: page boundary at which the prompt branches off the cached one. 0: none.
    """
    last = last_boundary(num_tokens, page_size)
    if start < branch < last and branch <= end:
        return ChunkRange(branch, branch)
    return ChunkRange(end, last if start < last <= end else 0)


def last_boundary(num_tokens: int, page_size: int) -> int:
    """Return the last page boundary from which the same prompt can continue if it is repeated."""
    return (num_tokens - 1) // page_size * page_size
