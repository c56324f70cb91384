"""Requests whose prefill nodes have just been lost.

A decode node that stalls for some seconds loses all pairs and hand-offs, while the prefill nodes
are healthy and cache most of the KV. It is paired with them again within a second or two. Until
then these requests wait for a limited time and hold no resources.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.batch.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class UnpairedEntry:
    request: Request
    candidates: tuple[str, ...]
    attempt: int  # number of the next attempt
    until: float  # time.monotonic()
    ticket: int = 0  # of a request that runs at the only candidate


class UnpairedQueue:
    """Requests that wait for a producer, in order of arrival."""

    def __init__(self, wait_s: float) -> None:
        """Create an empty queue.

        Args:
            wait_s: longest wait in seconds, from the last loss of a candidate.
        """
        self._wait_s = wait_s
        self._lost_at: dict[str, float] = {}  # by address
        self._waiters: dict[int, UnpairedEntry] = {}  # by request key

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[UnpairedEntry]:
        return iter(tuple(self._waiters.values()))

    def owner_lost(self, address: str, now: float) -> None:
        """Record that this node has lost the pair with a producer."""
        recent = ((each, at) for each, at in self._lost_at.items() if now - at < self._wait_s)
        self._lost_at = {**dict(recent), address: now}

    def worth_until(self, candidates: Collection[str]) -> float:
        """Return the time until which one of the candidates may come back."""
        lost_at = (self._lost_at.get(address, -math.inf) for address in candidates)
        return max(lost_at, default=-math.inf) + self._wait_s

    def append(self, waiter: UnpairedEntry) -> None:
        self._waiters[waiter.request.key] = waiter

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns whether it was queued here."""
        return self._waiters.pop(request.key, None) is not None

    def take(self, now: float, owners: Collection[str]) -> list[UnpairedEntry]:
        """Remove and return requests with a paired candidate or an expired wait."""
        over = [
            waiter
            for waiter in self
            if waiter.until <= now or any(address in owners for address in waiter.candidates)
        ]
        for waiter in over:
            self.remove(waiter.request)
        return over
