"""Requests without a prefill node to go to, though there was one a moment ago.

A decode node that was stopped for some seconds finds all its pairs ended, and every hand-off lost,
while the prefill nodes are well and have most of the KV in their caches: within a second or two it
is paired with them again. Until then these requests wait, for a bounded time, and hold nothing.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.batch.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    request: Request
    candidates: tuple[str, ...]
    attempt: int  # number of the one that it waits to begin
    until: float  # time.monotonic()
    ticket: int = 0  # of a request that the only candidate runs


class Unpaired:
    """In order of arrival."""

    def __init__(self, wait_s: float) -> None:
        """
        Args:
            wait_s: longest wait, from the loss of the node that was lost last.
        """
        self._wait_s = wait_s
        self._lost_at: dict[str, float] = {}  # by address
        self._waiters: dict[int, Waiter] = {}  # by request key

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters.values()))

    def owner_lost(self, address: str, now: float) -> None:
        """This node is paired with it no more."""
        recent = ((each, at) for each, at in self._lost_at.items() if now - at < self._wait_s)
        self._lost_at = {**dict(recent), address: now}

    def worth_until(self, candidates: Collection[str]) -> float:
        """Until when one of these may come back."""
        lost_at = (self._lost_at.get(address, -math.inf) for address in candidates)
        return max(lost_at, default=-math.inf) + self._wait_s

    def append(self, waiter: Waiter) -> None:
        self._waiters[waiter.request.key] = waiter

    def remove(self, request: Request) -> bool:
        """Whether it was here."""
        return self._waiters.pop(request.key, None) is not None

    def take(self, now: float, owners: Collection[str]) -> list[Waiter]:
        """Takes out those that have a candidate among the owners again, or have waited in vain."""
        over = [
            waiter
            for waiter in self
            if waiter.until <= now or any(address in owners for address in waiter.candidates)
        ]
        for waiter in over:
            self.remove(waiter.request)
        return over
