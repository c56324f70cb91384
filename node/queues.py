"""A queue in order of arrival, the scheduler as a queue, and all queues of a role."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic

from common.queueing.drain import QueueEstimator
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.scheduler.scheduler import Scheduler
from node.request_state import Ending, RequestQueue, RequestState, S, Stage, as_request_end


class KeyedQueue(Generic[S]):
    """Requests in order of arrival, without limits of their own."""

    stage: ClassVar[Stage]

    def __init__(self) -> None:
        self._states: dict[int, S] = {}  # by key

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(tuple(self._states.values()))

    @property
    def num_waiting(self) -> int:
        return len(self._states)

    def lengths(self) -> Mapping[str, int]:
        return {self.stage.value: len(self._states)}

    def put(self, state: S) -> None:
        state.move(self.stage, self)
        self._states[state.key] = state

    def remove(self, state: S, ending: Ending) -> bool:
        self.take(state)
        return True

    def take(self, state: S) -> None:
        """Remove a request that continues elsewhere."""
        del self._states[state.key]

    def expired(self, now: float) -> Iterable[tuple[S, Ending]]:
        return ()


class RequestQueues:
    """All queues of a role."""

    def __init__(self, *queues: RequestQueue[Any]) -> None:
        self._queues = queues

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self._queues)

    def lengths(self) -> dict[str, int]:
        return {name: size for queue in self._queues for name, size in queue.lengths().items()}

    def expired(self, now: float) -> Iterator[tuple[RequestState, Ending]]:
        """Remove and yield the requests that have waited too long, each with its end."""
        for queue in self._queues:
            yield from queue.expired(now)


class SchedulerQueue(Generic[S]):
    """Requests that the scheduler has: waiting, running or retracted.

    Attributes:
        backlog: prompts that this node has to compute.
        find: returns the state of a request, or None if it is closed.
    """

    def __init__(self, scheduler: Scheduler, find: Callable[[Request], S | None]) -> None:
        self.scheduler = scheduler
        self.backlog = QueueEstimator()
        self.find = find

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def lengths(self) -> Mapping[str, int]:
        return self.scheduler.queues()

    def put(self, state: S) -> None:
        self.scheduler.add(state.request)
        state.move(Stage.SCHEDULED, self)

    def join(self, state: S, request: Request, holding: PageHolding) -> bool:
        """Put a request whose KV exists into the running batch. See Scheduler.join."""
        joined = self.scheduler.join(request, holding)
        if joined:
            state.request = request
            state.move(Stage.SCHEDULED, self)
        return joined

    def remove(self, state: S, ending: Ending) -> bool:
        return self.scheduler.abort(state.request, as_request_end(ending)) is not None

    def expired(self, now: float) -> Iterator[tuple[S, Ending]]:
        for finished in self.scheduler.expire(now, self.backlog.queued_s):
            state = self.find(finished.request)
            if state is not None:
                yield state, finished.finish
