"""States that the prefix tree keeps: where one can go on from it although layers keep no KV.

A state is at a node's end, since whatever is learnt with one ends there. It is as large as the KV
of many tokens, so what a deeper one has left behind, and nobody has gone on from, goes first.
"""

from collections import deque

import numpy as np

from engine.batch.batch import Ints
from engine.kv_cache.pages import Holder, PageAllocator
from engine.kv_cache.radix_nodes import Node, TreePages

NO_STATE = np.empty(0, np.int32)


class TreeStates:
    """Engine thread only. Where models have no states, all of it does nothing."""

    def __init__(self, state_pages: int, pages: TreePages, pool: PageAllocator) -> None:
        self._state_pages = state_pages
        self._pages = pages
        self._pool = pool
        self._having: dict[Node, None] = {}  # nodes with a state
        self._passed: deque[Node] = deque()  # those that have got a deeper one below

    def __bool__(self) -> bool:
        return self._state_pages > 0

    def deepest(self, path: list[tuple[Node, int]], num_pages: int) -> tuple[int, Ints]:
        """The last place on a path, after at most so many pages, where one can go on, and its
        state; the beginning needs none.

        Args:
            path: nodes with where they begin, in pages.
        """
        for node, start in reversed(path):
            if len(node.state) and start + node.num_pages <= num_pages:
                return start + node.num_pages, node.state
        return 0, NO_STATE

    def add(self, node: Node, state: Ints) -> None:
        """Holds a state at the node's end, unless there is one."""
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

    def drop(self, node: Node) -> int:
        """Lets go of the node's state, if it has one; returns how many pages that freed."""
        state, node.state = node.state, NO_STATE
        if not len(state):
            return 0
        before = self._pool.num_free
        self._pages.let_go(state)
        del self._having[node]
        return self._pool.num_free - before

    def clear(self) -> None:
        """The tree is empty."""
        self._passed.clear()

    def thin(self, num_pages: int) -> int:
        """Frees states that a deeper one follows and nobody went on from, until so many pages are
        free; returns how many are."""
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
        """The same of any, those first that were walked past longest ago."""
        freed = 0
        for node in sorted(self._having, key=lambda node: node.last_used):
            if freed >= num_pages:
                break
            if self._alone(node):
                freed += self.drop(node)
        return freed

    def _alone(self, node: Node) -> bool:
        return bool(self._pool.held_only_by(node.state, Holder.CACHE).all())
