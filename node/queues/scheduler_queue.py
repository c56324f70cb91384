"""The scheduler as a queue of a role."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic

from common.queueing import QueueEstimator
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.scheduler.scheduler import Scheduler
from node.request_state import Ending, S, Stage, as_request_end


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
