"""A free list of pages that exposes premature releases."""

import numpy as np

from engine.batch.batch import Ints


class LifoFreeList:
    """A LIFO free list: a page that is dropped too early is reused immediately."""

    def __init__(self, num_pages: int) -> None:
        self._stack = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def put(self, pages: Ints) -> None:
        self._stack.extend(pages[::-1].tolist())

    def take(self, num_pages: int) -> Ints:
        at = len(self._stack) - num_pages
        taken, self._stack = self._stack[at:], self._stack[:at]
        return np.array(taken[::-1], np.int32)

    def remove(self, pages: Ints) -> None:
        gone = set(pages.tolist())
        self._stack = [page for page in self._stack if page not in gone]

    def all(self) -> Ints:
        return np.array(self._stack, np.int32)
