"""States that the prefix tree keeps, so that requests can continue from it although layers keep no
KV.

A state is always at a node's end, since a prefix inserted with a state ends there. It is as large
as the KV of many tokens. States that a deeper one made obsolete, and from which no request
continued, are therefore evicted first.

A state is kept at the last page boundary from which the same prompt could continue if it comes
again: it matches all but its last token. Another one is kept where the prompt branches off a cached
one, since prompts with that common prefix are likely to come again. A chunk that would pass such a
branch ends there.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix_nodes import RadixNode, TreePages

NO_STATE = np.empty(0, np.int32)


class TreeStates:
    """The states in the tree. Engine thread only. Does nothing for models without states."""

    def __init__(self, state_pages: int, pages: TreePages, pool: PageAllocator) -> None:
        self._state_pages = state_pages
        self._pages = pages
        self._pool = pool
        self._having: dict[RadixNode, None] = {}  # nodes with a state
        self._passed: deque[RadixNode] = deque()  # nodes with a deeper state below

    def __bool__(self) -> bool:
        return self._state_pages > 0

    def deepest(self, path: list[tuple[RadixNode, int]], num_pages: int) -> tuple[int, Ints]:
        """Return the last position on a path, after at most `num_pages` pages, at which a request
        can continue, and its state. Position 0 needs no state.

        Args:
            path: nodes with their starts, in pages.
        """
        for node, start in reversed(path):
            if len(node.state) and start + node.num_pages <= num_pages:
                return start + node.num_pages, node.state
        return 0, NO_STATE

    def add(self, node: RadixNode, state: Ints) -> None:
        """Hold a state at the node's end, unless there is one."""
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
        """Release the node's state, if it has one. Return the number of freed pages."""
        state, node.state = node.state, NO_STATE
        if not len(state):
            return 0
        before = self._pool.num_free
        self._pages.let_go(state)
        del self._having[node]
        return self._pool.num_free - before

    def clear(self) -> None:
        """Note that the tree is empty."""
        self._passed.clear()

    def thin(self, num_pages: int) -> int:
        """Free states that a deeper one follows and from which no request continued, until
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
        return bool(self._pool.held_only_by(node.state, PageHolder.CACHE).all())


class ChunkRange(NamedTuple):
    """One forward of a prompt, which ends at `end`. Its state after token `keep` is kept; 0: none
    is."""

    end: int
    keep: int


def stretch(start: int, end: int, *, num_tokens: int, branch: int, page_size: int) -> ChunkRange:
    """Return where the next forward of a prompt ends and which state it keeps.

    Args:
        start, end: token indices that would be computed next.
        num_tokens: of the whole prompt.
        branch: page boundary at which the prompt branches off the cached one; 0: none.
    """
    last = last_boundary(num_tokens, page_size)
    if start < branch < last and branch <= end:
        return ChunkRange(branch, branch)
    return ChunkRange(end, last if start < last <= end else 0)


def last_boundary(num_tokens: int, page_size: int) -> int:
    """Return the last page boundary from which a repetition of the prompt can continue."""
    return (num_tokens - 1) // page_size * page_size
