"""The nodes of the prefix tree, and the tree's holds on their pages."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.kv_cache.page_keys import PageKey
from engine.kv_cache.pages import PageAllocator, PageHolder


class RadixNode:
    """A run of pages without a branch. Its children begin with different pages of tokens."""

    __slots__ = (
        "children",
        "key",
        "keys",
        "last_used",
        "names",
        "num_saved",
        "number",
        "pages",
        "parent",
        "passed",
        "queued",
        "resumed",
        "settled_at",
        "state",
        "tokens",
    )

    def __init__(
        self, number: int, key: bytes, tokens: Ints, pages: Ints, parent: "RadixNode | None"
    ) -> None:
        self.number = number
        # Key among its parent's children: its first page of tokens, preceded by the namespace
        # directly below the root.
        self.key = key
        self.tokens = tokens  # [pages.shape[1] * page_size]
        self.pages = pages  # [tables, any], NO_PAGE outside kept windows
        self.parent = parent  # None: the root, or removed
        self.children: dict[bytes, RadixNode] = {}
        self.last_used = 0
        self.queued = False  # has an entry in the heap of leaves
        self.passed = False  # is in the queue of nodes that have a child
        self.resumed = False  # a request continued from within it
        self.state = np.empty(0, np.int32)  # pages of the state at its end, if one is kept
        # Names of its pages (prefix_hash.py), set while the tree has a journal or a lower tier.
        self.names: list[int] = []
        self.keys: list[PageKey] = []  # keys of its pages, set while the tree has a lower tier
        # Set by the lower tier: how many of its first pages are completely saved there, and when
        # this was checked.
        self.num_saved, self.settled_at = 0, -math.inf

    @property
    def num_pages(self) -> int:
        """Pages in each table."""
        num_pages: int = self.pages.shape[1]
        return num_pages

    def above(self) -> Iterator["RadixNode"]:
        """Yield every node above except the root, the nearest first."""
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
    """The tree's holds in the pool, and which of its pages have no other holder.

    Attributes:
        num_held: pages in the tree.
    """

    def __init__(self, pool: PageAllocator) -> None:
        self._pool = pool
        self.num_held = 0

    def hold(self, pages: Ints) -> None:
        """Hold pages for CACHE. Entries may be NO_PAGE."""
        there = present(pages)
        self._pool.hold(there, PageHolder.CACHE)
        self.num_held += len(there)

    def let_go(self, pages: Ints) -> None:
        there = present(pages)
        self.num_held -= len(there)
        self._pool.drop(there, PageHolder.CACHE)

    def alone(self, node: RadixNode) -> NDArray[np.bool_]:
        """Return where there is a page that only the tree holds: [tables, n]."""
        only = self._pool.held_only_by(node.pages.ravel(), PageHolder.CACHE)
        return only.reshape(node.pages.shape) & (node.pages >= 0)

    def loose_at_end(self, node: RadixNode) -> int:
        """Return the number of pages at its end that have no other holder in any table."""
        in_use = (~self.alone(node) & (node.pages >= 0)).any(axis=0)
        held = np.flatnonzero(in_use)
        return node.num_pages - (int(held[-1]) + 1 if len(held) else 0)


def present(pages: Ints) -> Ints:
    """Return the pages that are not NO_PAGE."""
    return pages[pages >= 0]
