"""Publications of pages to consumers, for backends whose producer serves each read itself.

Knows consumer numbers and page ids, not hand-offs. Any thread.
"""

import threading

import numpy as np

from common.errors import EngineFault
from kvtransfer.backends.base import Ints, first_outside


class PublishedPages:
    """Counts of publications by consumer and page. Costs 4 bytes a page for each consumer
    that has any.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._counts: dict[int, Ints] = {}
        self._totals: dict[int, int] = {}
        self._lock = threading.Lock()

    def publish(self, consumer: int, pages: Ints) -> None:
        """Add one publication of each page. Pages are distinct within a call."""
        with self._lock:
            if consumer not in self._counts:
                self._counts[consumer] = np.zeros(self._num_pages, np.int32)
                self._totals[consumer] = 0
            self._counts[consumer][pages] += 1
            self._totals[consumer] += len(pages)

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Remove one publication of each page. Pages are distinct within a call.

        Raises:
            EngineFault: a page is not published to this consumer.
        """
        with self._lock:
            if not len(pages):
                return
            counts = self._counts.get(consumer)
            if counts is None or bool((counts[pages] < 1).any()):
                raise EngineFault(f"withdrawn from consumer {consumer} without a publication")
            counts[pages] -= 1
            self._totals[consumer] -= len(pages)
            if not self._totals[consumer]:
                del self._counts[consumer], self._totals[consumer]

    def forget(self, consumer: int) -> None:
        """Remove all publications to this consumer."""
        with self._lock:
            self._counts.pop(consumer, None)
            self._totals.pop(consumer, None)

    def first_refused(self, consumer: int, pages: Ints) -> int | None:
        """Return the first of these pages that this consumer may not read now, or None."""
        if not len(pages):
            return None
        if (outside := first_outside(pages, self._num_pages)) is not None:
            return outside
        with self._lock:
            counts = self._counts.get(consumer)
            if counts is None:
                return int(pages[0])
            counted = counts.take(pages)
        if np.minimum.reduce(counted) > 0:
            return None
        return int(pages[counted < 1][0])
