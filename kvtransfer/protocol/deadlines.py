"""Deadlines by key, and limits for an owner's progress. Knows no clock."""

import heapq
from typing import Any, Generic, Protocol, TypeVar

# Until something is known: slow for a GPU, fast for a CPU. Heartbeats detect a dead owner. This
# estimate only prevents that hand-offs of a live owner with a long queue are abandoned.
_FIRST_GUESS_S = 0.005  # per token
_WEIGHT = 0.2  # of the newest hand-off
_PATIENCE = 5.0  # times the expected duration


class _Orderable(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Orderable)


class DeadlineTimer(Generic[K]):
    """At most one deadline per key."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        # May hold entries that `_due` no longer has, or has with another time.
        self._heap: list[tuple[float, K]] = []

    def set(self, key: K, when: float) -> None:
        """Set or move the deadline of `key`."""
        self._due[key] = when
        heapq.heappush(self._heap, (when, key))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(time, key) for key, time in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove the deadline of `key`, if it has one."""
        self._due.pop(key, None)

    def next(self) -> float | None:
        """Return the nearest deadline, or None."""
        while self._heap:
            when, key = self._heap[0]
            if self._due.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed, in order of time."""
        due: list[K] = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[1]
            del self._due[key]
            due.append(key)
        return due


class ProducerPace:
    """The learnt pace of one owner. `progress_s` is the minimum of all limits."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._token_s = _FIRST_GUESS_S

    def limit_s(self, num_tokens: int) -> float:
        """Return the longest wait for progress, with so many tokens left to compute."""
        return max(self._progress_s, _PATIENCE * self._token_s * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that so many tokens, of this hand-off and of those queued before it, took
        `seconds`.
        """
        if num_tokens > 0:
            self._token_s += _WEIGHT * (seconds / num_tokens - self._token_s)
