"""An event loop whose time jumps to the next timer when nothing is ready."""

import asyncio
import selectors
from collections.abc import Iterator
from typing import Any

from simulation.virtual.clock import VirtualClock

_MOST_TURNS = 200_000  # at one instant


class Deadlock(Exception):
    """No task is ready and no timer is set, or work repeats without progress of time."""


class JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock instead of waiting. Sockets are real."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._turns_since, self._turns = clock.now, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # A call takes longer than most callbacks, so sockets are read only when no callback is
        # ready.
        ready = [] if timeout == 0 else super().select(0)
        if self._clock.now > self._turns_since:
            self._turns_since, self._turns = self._clock.now, 0
        self._turns += 1
        if self._turns > _MOST_TURNS:
            self._turns = 0  # the tasks are cancelled next
            raise Deadlock(_sentence("work repeats at one instant", ready))
        if not ready:
            if timeout is None:
                raise Deadlock(_sentence("nothing is ready and no timer is set", ready))
            self._clock.to(self._clock.now + timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        super().__init__(JumpingSelector(clock))

    def time(self) -> float:
        return self._clock.now


def _sentence(what: str, ready: list[tuple[selectors.SelectorKey, int]]) -> str:
    """Describe a deadlock: the ready sockets, and the position of each waiting task."""
    loop = asyncio.get_running_loop()
    sockets = [f"ready: {key.data}" for key, _ in ready]
    return "\n  ".join((what, *sockets, *sorted(_waiters(asyncio.all_tasks(loop)))))


def _waiters(tasks: set[asyncio.Task[Any]]) -> Iterator[str]:
    """Yield the position where each task waits, in its innermost coroutine."""
    for task in tasks:
        waiting: Any = task.get_coro()
        while hasattr(inner := getattr(waiting, "cr_await", None), "cr_await"):
            waiting = inner
        if (frame := getattr(waiting, "cr_frame", None)) is not None:
            code = frame.f_code
            yield f"waits: {code.co_qualname} in {code.co_filename}, line {frame.f_lineno}"
