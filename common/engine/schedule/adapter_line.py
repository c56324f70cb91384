"""Requests whose adapter has no slot of the device yet. They hold nothing else: none but those of
adapters without a slot wait for them.

They go by their place. Who has waited too long is not overtaken any more by those whose adapter is
there: what runs comes to its end, and then a slot is free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.engine.adapters.adapters import Adapters
from common.engine.rows.request import Request
from common.engine.schedule.arrivals import ByPlace, is_overdue

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[T]):
    request: Request
    beside: T

    @property
    def place(self) -> float:
        return self.request.place


class AdapterLine(Generic[T]):
    """Engine thread only."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._waiting: ByPlace[int, _Waiting[T]] = ByPlace()
        self._tried = (-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request, beside: T) -> None:
        """A request that holds an adapter, and what its owner wants back with it."""
        self._waiting.put(request.key, _Waiting(request, beside))

    def remove(self, request: Request) -> bool:
        return self._waiting.take(request.key) is not None

    def requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting]

    def with_slot(self, now: float) -> Iterator[tuple[Request, T]]:
        """Those that have a slot now. Takes them."""
        while self._tried != self._changes:  # whoever is given one may end at once
            self._tried = self._changes
            for waiting in list(self._waiting):
                if self._adapters.take_slot(waiting.request):
                    self._waiting.take(waiting.request.key)
                    yield waiting.request, waiting.beside
                elif is_overdue(waiting.request.arrived, now):
                    break

    @property
    def _changes(self) -> tuple[int, int]:
        return self._waiting.num_changes, self._adapters.num_changes
