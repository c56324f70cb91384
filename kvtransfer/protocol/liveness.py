"""Deadlines and heartbeats of one end, and the states of a hand-off. Knows no clock.

A heartbeat means that this node's engine makes progress (rule 7). While it does not, none is due.

The states of a hand-off are the same on both ends:

    BOOTSTRAPPING      opened, not granted
    WAITING_FOR_INPUT  granted, nothing published
    TRANSFERRING       pages published, being read
    SUCCESS | FAILED   ended

    BOOTSTRAPPING -> WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS;  all but SUCCESS -> FAILED
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from common.config import TransferConfig
from common.errors import EngineFault

# Until something is known: slow for a GPU, fast for a CPU. Heartbeats detect a dead producer. This
# estimate only prevents that hand-offs of a live producer with a long queue are abandoned.
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
    """The learnt pace of one producer. `progress_s` is the minimum of all limits."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._token_s = _FIRST_GUESS_S

    def limit_s(self, num_tokens: int) -> float:
        """Return the longest wait for progress, with this number of tokens left to compute."""
        return max(self._progress_s, _PATIENCE * self._token_s * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that this many tokens, of this hand-off and of earlier ones in the queue, took
        `seconds`.
        """
        if num_tokens > 0:
            self._token_s += _WEIGHT * (seconds / num_tokens - self._token_s)


@dataclass(slots=True)
class HeartbeatsDue:
    heartbeats: list[int]  # streams on which to send a heartbeat
    silent: list[int]  # streams whose peer has missed too many heartbeats


class HeartbeatTimer:
    """Heartbeat timers. Streams are this node's own numbers."""

    def __init__(self, config: TransferConfig) -> None:
        self._interval_s = config.heartbeat_s
        self._silence_s = config.heartbeat_s * config.max_missed_heartbeats
        self._next: DeadlineTimer[int] = DeadlineTimer()
        self._silence: DeadlineTimer[int] = DeadlineTimer()
        self._sequences: dict[int, int] = {}
        self.moving = True  # whether this node's engine makes progress

    def start(self, stream: int, now: float) -> None:
        self._sequences[stream] = 0
        self._next.set(stream, now + self._interval_s)
        self.heard(stream, now)

    def stop(self, stream: int) -> None:
        del self._sequences[stream]
        self._next.drop(stream)
        self._silence.drop(stream)

    def heard(self, stream: int, now: float) -> None:
        """Record a heartbeat of the peer."""
        self._silence.set(stream, now + self._silence_s)

    def sequence(self, stream: int) -> int:
        """Return the number of the heartbeat that is being sent: 1, 2, ..."""
        self._sequences[stream] += 1
        return self._sequences[stream]

    def take_due(self, now: float) -> HeartbeatsDue:
        heartbeats = self._next.take_due(now)
        for stream in heartbeats:
            self._next.set(stream, now + self._interval_s)
        return HeartbeatsDue(heartbeats if self.moving else [], self._silence.take_due(now))

    def next_deadline(self) -> float | None:
        return earliest((self._next.next(), self._silence.next()))


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest time that is not None, or None."""
    return min((time for time in times if time is not None), default=None)


class HandoffStatus(Enum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_NEXT = {
    HandoffStatus.BOOTSTRAPPING: {HandoffStatus.WAITING_FOR_INPUT, HandoffStatus.FAILED},
    HandoffStatus.WAITING_FOR_INPUT: {HandoffStatus.TRANSFERRING, HandoffStatus.FAILED},
    HandoffStatus.TRANSFERRING: {
        HandoffStatus.TRANSFERRING,
        HandoffStatus.SUCCESS,
        HandoffStatus.FAILED,
    },
    HandoffStatus.SUCCESS: set(),
    HandoffStatus.FAILED: set(),
}


def advance(old: HandoffStatus, new: HandoffStatus) -> HandoffStatus:
    """Return `new`. Raises EngineFault if the transition from `old` is invalid."""
    if new not in _NEXT[old]:
        raise EngineFault(f"a hand-off cannot go from {old.name} to {new.name}")
    return new
