"""Resources that a request needs before scheduling: it passes through one queue after another.

    put -> guide compiled -> adapter in a slot -> ... -> prepared

A request enters only the queues whose resource it needs, and holds nothing that others wait for. A
further resource is one more queue. This module knows which requests wait in them and their
deadlines.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.errors import ServingError
from engine.batch.request import Request, RequestEnd, out_of_time, waited_too_long
from engine.scheduler.results import FinishedRequest

T = TypeVar("T")


class RequestQueue(Protocol):
    """A queue of requests for the same kind of resource. Engine thread only."""

    @property
    def name(self) -> str:
        """Return the name of the queue."""
        ...

    def needed_by(self, request: Request) -> bool: ...

    def put(self, request: Request) -> None:
        """Add a request.

        Raises:
            ServingError: it cannot have the resource.
        """
        ...

    def take(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Yield and remove the requests that have the resource, or cannot have it, with
        the reason.
        """
        ...

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns False if it is not here."""
        ...

    def __len__(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Unprepared(Generic[T]):
    request: Request
    beside: T


class PreparationStages(Generic[T]):
    """The queues that a request passes through. Engine thread only. `T`: a value that its owner
    gets back with the request.
    """

    def __init__(self, *lines: RequestQueue) -> None:
        self._lines = lines
        self._requests: dict[int, _Unprepared[T]] = {}  # by key
        self._prepared: deque[Request] = deque()  # and not yielded yet

    def __len__(self) -> int:
        return len(self._requests)

    def queues(self) -> dict[str, int]:
        return {line.name: len(line) for line in self._lines}

    def put(self, request: Request, beside: T) -> None:
        """Add a request.

        Raises:
            ServingError: it cannot have a resource that it needs.
        """
        if self._is_prepared(request, self._lines):
            self._prepared.append(request)
        self._requests[request.key] = _Unprepared(request, beside)

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns False if it is not here."""
        if self._requests.pop(request.key, None) is None:
            return False
        if not any(line.remove(request) for line in self._lines):
            self._prepared.remove(request)
        return True

    def expire(self, now: float, queued_s: float) -> list[FinishedRequest]:
        """Remove the requests whose deadline has passed, or whose queue limit has expired.

        Args:
            queued_s: retry-after value that those over their queue limit get.
        """
        ended: list[FinishedRequest] = []
        for each in list(self._requests.values()):
            finish = _late(each.request, now, queued_s)
            if finish is not None:
                self.remove(each.request)
                ended.append(FinishedRequest(each.request, finish))
        return ended

    def take(self, now: float) -> Iterator[tuple[Request, T, ServingError | None]]:
        """Yield and remove the requests that have all resources, or cannot have one, with the
        reason.
        """
        num_left = -1
        # A yielded request may end at once and free resources.
        while num_left != len(self._requests):
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

    def _is_prepared(self, request: Request, lines: tuple[RequestQueue, ...]) -> bool:
        """Return whether the request needs none of these queues. Otherwise add it to the first one
        that it needs.
        """
        line = next((line for line in lines if line.needed_by(request)), None)
        if line is not None:
            line.put(request)
        return line is None


def _late(request: Request, now: float, queued_s: float) -> RequestEnd | None:
    if request.deadline < now:
        return out_of_time()
    return waited_too_long(queued_s) if request.start_by < now else None
