"""Requests whose adapter has no slot on the device yet. They hold nothing else. Only requests of
adapters without a slot wait for them.

They are served in queue order. Requests whose adapter has a slot no longer overtake one that has
waited too long. So the running requests end, and a slot becomes free.
"""

from collections.abc import Iterator

from engine.adapters.adapters import AdapterManager
from engine.batch.request import Request
from engine.scheduler.arrivals import PriorityQueue, is_overdue


class AdapterQueue:
    """The queue for adapter slots. Engine thread only."""

    name = "adapter"

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters
        self._waiting: PriorityQueue[int, Request] = PriorityQueue()
        self._tried = (-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        return bool(request.spec.adapter)

    def put(self, request: Request) -> None:
        """Add a request that holds an adapter."""
        self._waiting.put(request.key, request)

    def remove(self, request: Request) -> bool:
        return self._waiting.take(request.key) is not None

    def ready(self, now: float) -> Iterator[tuple[Request, None]]:
        """Yield and remove the requests that have a slot now."""
        while self._tried != self._changes:  # a request that gets a slot may end at once
            self._tried = self._changes
            for request in list(self._waiting):
                if self._adapters.take_slot(request):
                    self._waiting.take(request.key)
                    yield request, None
                elif is_overdue(request.arrived, now):
                    break

    @property
    def _changes(self) -> tuple[int, int]:
        return self._waiting.num_changes, self._adapters.num_changes
