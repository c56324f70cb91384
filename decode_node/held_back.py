"""Requests to be placed after the pause of this node. They hold no resources."""

from collections.abc import Iterator

from decode_node.unpaired import UnpairedEntry
from engine.batch.request import Request


class PausedQueue:
    """Paused requests in order of arrival. `until` is the time by which a waiter must be placed."""

    def __init__(self) -> None:
        self._waiters: dict[int, UnpairedEntry] = {}  # by request key

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[UnpairedEntry]:
        return iter(tuple(self._waiters.values()))

    def append(self, waiter: UnpairedEntry) -> None:
        self._waiters[waiter.request.key] = waiter

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns whether it was queued here."""
        return self._waiters.pop(request.key, None) is not None
