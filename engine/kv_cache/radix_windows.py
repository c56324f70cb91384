"""The pages that the prefix tree keeps in tables with windows, and where requests can continue.

Pages before an end from which a request continued, or may continue, are worth keeping. Pages that a
longer prefix made obsolete are evicted first. Without windows this module does nothing.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from common.page_tables import PageTables
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE
from engine.kv_cache.radix_nodes import RadixNode, TreePages


class TreeWindows:
    """The windows in the tree. Engine thread only."""

    def __init__(self, tables: PageTables, pages: TreePages) -> None:
        self._tables = tables
        self._sliding = tables.sliding
        self._has_window = np.array([[window is not None] for window in tables.windows])
        self._pages = pages
        self._passed: deque[RadixNode] = deque()  # nodes with a child, to be checked

    def __bool__(self) -> bool:
        return bool(self._sliding)

    def last_resumable(self, pages: Ints) -> int:
        """Return the result of `last_within` for the model's tables."""
        return last_within(self._tables, pages)

    def within(self, pages: Ints, num_pages: int) -> Ints:
        """Return pages [tables, n] with only those that are visible after `num_pages` of them; the
        others become NO_PAGE. A copy."""
        kept = pages.copy()
        num_tokens = num_pages * self._tables.page_size
        for table, _ in self._sliding:
            kept[table, : self._tables.live_from(table, num_tokens)] = NO_PAGE
        return kept

    def note_passed(self, node: RadixNode) -> None:
        """Note that the node has a child: its own windows may be obsolete."""
        if self._sliding and node.parent is not None and not node.passed:
            node.passed = True
            self._passed.append(node)

    def fill(self, node: RadixNode, pages: Ints) -> None:
        """Add pages that a node lacks among its first ones."""
        if self._sliding:
            mine = node.pages[:, : pages.shape[1]]
            new = np.where(mine < 0, pages, NO_PAGE)
            self._pages.hold(new)
            np.copyto(mine, new, where=new >= 0)
            if (new >= 0).any():
                node.num_saved = 0

    def thin(self, num_pages: int) -> int:
        """Free windows of nodes with a child that no end worth keeping needs, until `num_pages` are
        free. Return the number of freed pages."""
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
        """Release a node's pages in tables with windows, where [tables, pages] is true. Return how
        many."""
        which = which & self._has_window
        gone = node.pages[which]
        if len(gone):
            self._pages.let_go(gone)
            node.pages[which] = NO_PAGE
        return len(gone)

    def clear(self) -> None:
        """Note that the tree is empty."""
        self._passed.clear()

    def _thin(self, node: RadixNode) -> int:
        """Return the number of freed pages. Pages with other holders are checked again later."""
        below = _tokens_to_next_end(node)
        spare = np.zeros(node.pages.shape, np.bool_)
        for table, window in self._sliding:
            needed = max(0, window + self._tables.page_size - below)
            num_spare = max(0, len(node.tokens) - needed) // self._tables.page_size
            spare[table, :num_spare] = True
        spare &= node.pages >= 0
        alone = self._pages.alone(node)
        if (spare & ~alone).any():
            self.note_passed(node)
        return self.drop(node, spare & alone)


def last_within(tables: PageTables, pages: Ints) -> int:
    """Return the largest number, at most n, of these pages, [tables, n], after which all pages that
    windows see are present."""
    ends = np.arange(pages.shape[1] + 1)
    whole = np.ones(len(ends), np.bool_)
    for table, window in tables.sliding:
        lacking = np.concatenate(([0], np.cumsum(pages[table] < 0)))
        firsts = np.maximum(ends * tables.page_size - window + 1, 0)
        whole &= lacking == lacking[firsts // tables.page_size]
    return int(np.flatnonzero(whole)[-1])


def _tokens_to_next_end(node: RadixNode) -> int:
    """Return the tokens from a node's end to the first end below from which a request continued, or
    may continue: a branch, or a leaf's end."""
    num_tokens = 0
    while len(node.children) == 1 and not node.resumed:
        (node,) = node.children.values()
        num_tokens += len(node.tokens)
    return num_tokens
