"""Beats of one end: when to send one on each stream, and which streams have fallen silent.

A beat says "my engine moves" (rule 7): while it does not, none is due.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.config import TransferConfig
from kvtransfer.protocol.deadlines import Deadlines


@dataclass(slots=True)
class Due:
    beats: list[int]  # streams to beat on
    silent: list[int]  # streams whose peer has missed too many beats


class Beats:
    """Streams are this node's own numbers."""

    def __init__(self, config: TransferConfig) -> None:
        self._interval_s = config.heartbeat_s
        self._silence_s = config.heartbeat_s * config.missed_beats
        self._next: Deadlines[int] = Deadlines()
        self._silence: Deadlines[int] = Deadlines()
        self._sequences: dict[int, int] = {}
        self.moving = True  # whether this node's engine moves

    def start(self, stream: int, now: float) -> None:
        self._sequences[stream] = 0
        self._next.set(stream, now + self._interval_s)
        self.heard(stream, now)

    def stop(self, stream: int) -> None:
        del self._sequences[stream]
        self._next.drop(stream)
        self._silence.drop(stream)

    def heard(self, stream: int, now: float) -> None:
        """The peer has beaten."""
        self._silence.set(stream, now + self._silence_s)

    def sequence(self, stream: int) -> int:
        """The number of the beat that is being sent: 1, 2, ..."""
        self._sequences[stream] += 1
        return self._sequences[stream]

    def take_due(self, now: float) -> Due:
        beats = self._next.take_due(now)
        for stream in beats:
            self._next.set(stream, now + self._interval_s)
        return Due(beats if self.moving else [], self._silence.take_due(now))

    def next_deadline(self) -> float | None:
        return earliest((self._next.next(), self._silence.next()))


def earliest(times: Iterable[float | None]) -> float | None:
    """The least of those that are not None."""
    return min((time for time in times if time is not None), default=None)
