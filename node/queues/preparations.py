"""What a request needs before it can have its turn: lines that it goes through, one after another.

    put -> guide compiled -> adapter in a slot -> ... -> prepared

It stands in those lines only that have something it needs, and holds nothing that others wait for.
A further need is one more line; who waits in them, for how long and until when is known here.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.errors import ServingError
from engine.batch.request import Finish, Request, out_of_time, waited_too_long
from engine.scheduler.outcome import Finished

T = TypeVar("T")


class Line(Protocol):
    """Requests that wait for the same kind of thing. Engine thread only."""

    @property
    def name(self) -> str:
        """As the queue is called."""
        ...

    def needed_by(self, request: Request) -> bool: ...

    def put(self, request: Request) -> None:
        """Raises:
        ServingError: it cannot have what it needs.
        """
        ...

    def take(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Those that wait no longer, and why, if it was in vain. Takes them."""
        ...

    def remove(self, request: Request) -> bool:
        """False: it is not here."""
        ...

    def __len__(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Unprepared(Generic[T]):
    request: Request
    beside: T


class Preparations(Generic[T]):
    """Engine thread only. `T`: what a request's owner wants back with it."""

    def __init__(self, *lines: Line) -> None:
        self._lines = lines
        self._requests: dict[int, _Unprepared[T]] = {}  # by key
        self._prepared: deque[Request] = deque()  # and not taken yet

    def __len__(self) -> int:
        return len(self._requests)

    def queues(self) -> dict[str, int]:
        return {line.name: len(line) for line in self._lines}

    def put(self, request: Request, beside: T) -> None:
        """Raises:
        ServingError: it cannot have what it needs.
        """
        if self._is_prepared(request, self._lines):
            self._prepared.append(request)
        self._requests[request.key] = _Unprepared(request, beside)

    def remove(self, request: Request) -> bool:
        """False: it is not here."""
        if self._requests.pop(request.key, None) is None:
            return False
        if not any(line.remove(request) for line in self._lines):
            self._prepared.remove(request)
        return True

    def expire(self, now: float, queued_s: float) -> list[Finished]:
        """Takes out what is past its deadline, or can no longer be in time.

        Args:
            queued_s: what such a one is told, when to come again.
        """
        ended: list[Finished] = []
        for each in list(self._requests.values()):
            finish = _late(each.request, now, queued_s)
            if finish is not None:
                self.remove(each.request)
                ended.append(Finished(each.request, finish))
        return ended

    def take(self, now: float) -> Iterator[tuple[Request, T, ServingError | None]]:
        """Those that have all they need, or cannot have it, and why. Takes them."""
        num_left = -1
        while num_left != len(self._requests):  # whoever is taken may end at once, and make room
            num_left = len(self._requests)
            while self._prepared:
                request = self._prepared.popleft()
                yield request, self._requests.pop(request.key).beside, None
            for place, line in enumerate(self._lines, 1):
                for request, refusal in line.take(now):
                    try:
                        if refusal is not None:
                            raise refusal
                        if not self._is_prepared(request, self._lines[place:]):
                            continue
                    except ServingError as error:
                        refusal = error
                    yield request, self._requests.pop(request.key).beside, refusal

    def _is_prepared(self, request: Request, lines: tuple[Line, ...]) -> bool:
        """Else it has joined the first of these lines that has something for it."""
        line = next((line for line in lines if line.needed_by(request)), None)
        if line is not None:
            line.put(request)
        return line is None


def _late(request: Request, now: float, queued_s: float) -> Finish | None:
    if request.deadline < now:
        return out_of_time()
    return waited_too_long(queued_s) if request.start_by < now else None
