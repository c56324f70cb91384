"""Readers that have sent Hello and wait until their data paths are prepared.

Knows streams, owners and a deadline. The publisher handles readers that are ready.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.errors import TransferError
from common.logs import Throttle, ThrottledLog
from kvtransfer.backends.base import PageProducer
from kvtransfer.pairing import DataPath, PairHello

WAIT_S = 10.0  # longest wait; a reader waits longer
_log = ThrottledLog(logging.getLogger(__name__), Throttle())


@dataclass(frozen=True, slots=True)
class AdmittedConsumer:
    """A reader, and the paths that it is offered."""

    stream: int
    instance: int
    paths: tuple[DataPath, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    instance: int
    preparations: tuple[Future[Any], ...]
    due: float


class ConsumerAdmissions:
    """Readers that wait for their paths. Transfer thread only.

    Args:
        owners: by name of their backend, in the order in which readers should try them.
        wake: causes a call of `take_ready` soon. Called by any thread.
    """

    def __init__(self, owners: Mapping[str, PageProducer], wake: Callable[[], None]) -> None:
        self._owners = owners
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}  # by stream, oldest first

    def begin(self, stream: int, hello: PairHello, now: float) -> None:
        preparations = tuple(owner.prepare(stream) for owner in self._owners.values())
        self._waiting[stream] = _Waiting(hello.instance, preparations, now + WAIT_S)
        for preparation in preparations:
            preparation.add_done_callback(lambda _: self._wake())

    def forget(self, stream: int) -> None:
        """Remove a waiting reader. The owners must be notified separately. Idempotent."""
        self._waiting.pop(stream, None)

    @property
    def streams(self) -> tuple[int, ...]:
        """Return the streams on which readers wait."""
        return tuple(self._waiting)

    def streams_of(self, instance: int) -> list[int]:
        """Return the streams on which a reader of this instance waits."""
        return [stream for stream, one in self._waiting.items() if one.instance == instance]

    def take_ready(self, now: float) -> list[AdmittedConsumer]:
        """Remove and return the readers whose paths are all prepared, or whose time has expired."""
        ready = []
        for stream, waiting in list(self._waiting.items()):
            done = all(preparation.done() for preparation in waiting.preparations)
            if done or now >= waiting.due:
                if not done:
                    _log.warning("data path setup timed out", stream=stream, seconds=WAIT_S)
                del self._waiting[stream]
                ready.append(AdmittedConsumer(stream, waiting.instance, self._paths(stream)))
        return ready

    def next_deadline(self) -> float | None:
        return min((waiting.due for waiting in self._waiting.values()), default=None)

    def _paths(self, stream: int) -> tuple[DataPath, ...]:
        paths = []
        for name, owner in self._owners.items():
            try:
                paths.append(DataPath(name, owner.admit(stream)))
            except TransferError as error:
                _log.warning("data path not offered", path=name, stream=stream, reason=error)
        return tuple(paths)
