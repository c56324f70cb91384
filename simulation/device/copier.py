"""Copies between the pool and host memory that take the modelled time, beside the steps."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.batch.batch import Ints, PageCopies
from simulation.cost import StepCost
from simulation.device.witness import Words, torn


class SimCopy:
    """A copy, see TierCopy."""

    done = False


class SimCopier:
    """Copies pages, see TierCopier. A page is torn if it changes while it is copied.

    Attributes:
        notify: called when a copy is done.

    Args:
        page_bytes: of a real page, which determine the time of copies.
    """

    def __init__(self, pool: Words, host_pool: Words, cost: StepCost, page_bytes: int) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._pool, self._host_pool = pool, host_pool
        self._out, self._in = (_Direction(cost, page_bytes, lambda: self.notify()) for _ in "oi")

    def save(self, copies: PageCopies) -> SimCopy:
        return self._out.submit(self._pool, copies.device_pages, self._host_pool, copies.host_pages)

    def bring(self, copies: PageCopies) -> SimCopy:
        return self._in.submit(self._host_pool, copies.host_pages, self._pool, copies.device_pages)

    def close(self) -> None:
        """Cancel all copies."""
        for direction in (self._out, self._in):
            direction.close()


class _Direction:
    """The copies of one direction, one after the other."""

    def __init__(self, cost: StepCost, page_bytes: int, notify: Callable[[], None]) -> None:
        self._cost = cost
        self._page_bytes = page_bytes
        self._notify = notify
        self._waiting: deque[Callable[[], None]] = deque()  # begins of copies
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, source: Words, pages: Ints, target: Words, target_pages: Ints) -> SimCopy:
        copy = SimCopy()

        def begin() -> None:
            before = source[pages]

            def end() -> None:
                target[target_pages] = torn(before, source[pages])
                copy.done = True
                self._timer = None
                self._begin()
                self._notify()

            seconds = self._cost.host_copy_s(len(pages) * self._page_bytes)
            self._timer = asyncio.get_running_loop().call_later(seconds, end)

        self._waiting.append(begin)
        self._begin()
        return copy

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        if self._timer is None and self._waiting:
            self._waiting.popleft()()
