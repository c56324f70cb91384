"""Resources that a request needs before scheduling: it passes through one queue after another.

    put -> guide compiled -> adapter in a slot -> ... -> prepared

A request enters only the queues whose resource it needs, and holds nothing that others wait for. A
further resource is one more queue. This module knows which requests wait in them and their
deadlines.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol

from common.errors import ServingError
from common.queueing import QueueEstimator
from engine.batch.request import Request, RequestEnd, out_of_time, waited_too_long
from node.request_state import Ending, S, Stage


class PreparationQueue(Protocol):
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

    def ready(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Remove and yield the requests that have the resource, or cannot have it, with the
        reason.
        """
        ...

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns False if it is not here."""
        ...

    def __len__(self) -> int: ...


class PreparationStages(Generic[S]):
    """The queues that a request passes through. Engine thread only.

    Args:
        backlog: prompts to be computed, whose delay requests over their queue limit are told.
    """

    def __init__(self, backlog: QueueEstimator, *queues: PreparationQueue) -> None:
        self._backlog = backlog
        self._queues = queues
        self._states: dict[int, S] = {}  # by key
        self._prepared: deque[Request] = deque()  # and not yielded yet

    @property
    def num_waiting(self) -> int:
        return len(self._states)

    def lengths(self) -> Mapping[str, int]:
        return {queue.name: len(queue) for queue in self._queues}

    def put(self, state: S) -> None:
        state.move(Stage.PREPARING, self)
        if self._is_prepared(state.request, self._queues):
            self._prepared.append(state.request)
        self._states[state.key] = state

    def remove(self, state: S, ending: Ending) -> bool:
        del self._states[state.key]
        if not any(queue.remove(state.request) for queue in self._queues):
            self._prepared.remove(state.request)
        return True

    def expired(self, now: float) -> Iterator[tuple[S, Ending]]:
        for state in tuple(self._states.values()):
            end = _late(state.request, now, self._backlog)
            if end is not None:
                self.remove(state, end)
                yield state, end

    def ready(self, now: float) -> Iterator[tuple[S, ServingError | None]]:
        """Remove and yield the requests that have all resources, or cannot have one, with the
        reason.
        """
        num_left = -1
        # A yielded request may end at once and free resources.
        while num_left != len(self._states):
            num_left = len(self._states)
            while self._prepared:
                yield self._states.pop(self._prepared.popleft().key), None
            for place, queue in enumerate(self._queues, 1):
                for request, refusal in queue.ready(now):
                    try:
                        if refusal is not None:
                            raise refusal
                        if not self._is_prepared(request, self._queues[place:]):
                            continue
                    except ServingError as error:
                        refusal = error
                    yield self._states.pop(request.key), refusal

    def _is_prepared(self, request: Request, queues: tuple[PreparationQueue, ...]) -> bool:
        """Return whether the request needs none of these queues. Otherwise add it to the first one
        that it needs.
        """
        queue = next((queue for queue in queues if queue.needed_by(request)), None)
        if queue is not None:
            queue.put(request)
        return queue is None


def _late(request: Request, now: float, backlog: QueueEstimator) -> RequestEnd | None:
    if request.deadline < now:
        return out_of_time()
    return waited_too_long(backlog.queued_s) if request.start_by < now else None
