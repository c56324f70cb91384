"""Heartbeats of one end: when to send one on each stream, and which streams are silent.

A heartbeat means that this node's engine makes progress (rule 7). While it does not, none is due.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.config import TransferConfig
from kvtransfer.protocol.deadlines import DeadlineTimer


@dataclass(slots=True)
class HeartbeatsDue:
    beats: list[int]  # streams on which to send a heartbeat
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
        beats = self._next.take_due(now)
        for stream in beats:
            self._next.set(stream, now + self._interval_s)
        return HeartbeatsDue(beats if self.moving else [], self._silence.take_due(now))

    def next_deadline(self) -> float | None:
        return earliest((self._next.next(), self._silence.next()))


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest time that is not None, or None."""
    return min((time for time in times if time is not None), default=None)
