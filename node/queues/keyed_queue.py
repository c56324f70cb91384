"""A queue in order of arrival, and all queues of a role."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic

from node.request_state import Ending, RequestQueue, RequestState, S, Stage


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
