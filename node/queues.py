"""The queues that all roles use: by arrival, the scheduler's, and preparation (adapter slots,
grammars, loads).
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, Protocol

from common.errors import InvalidRequest, ServingError
from common.queueing import QueueEstimator
from common.requests.sampling import GuidedDecoding
from engine.batch.holding import PageHolding
from engine.batch.request import Request, RequestEnd, out_of_time, waited_too_long
from engine.grammar.matching import CompiledGuide, Match
from engine.offload.cache_tiers import CacheTiers
from engine.offload.tier_matches import TierMatch
from engine.scheduler.arrivals import PriorityQueue, is_overdue
from engine.scheduler.scheduler import DEADLINE_CHECK_S, Scheduler
from node.request_state import Ending, RequestQueue, RequestStage, RequestState, S, as_request_end


class KeyedQueue(Generic[S]):
    """Requests in order of arrival, without limits."""

    stage: ClassVar[RequestStage]

    def __init__(self) -> None:
        self._states: dict[int, S] = {}  # by key

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        yield from tuple(self._states.values())

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
        """Remove a request that continues in another queue."""
        del self._states[state.key]

    def expired(self, now: float) -> Iterable[tuple[S, Ending]]:
        return ()


class RequestQueues:
    """All queues of a role."""

    def __init__(self, scheduled: "SchedulerQueue[Any]", *others: RequestQueue[Any]) -> None:
        self.scheduled = scheduled
        self._others = others
        self._check_at = 0.0

    @property
    def num_waiting(self) -> int:
        return self.scheduled.num_waiting + sum([each.num_waiting for each in self._others])

    def lengths(self) -> dict[str, int]:
        queues = self.scheduled, *self._others
        return {name: size for queue in queues for name, size in queue.lengths().items()}

    def expired(self, now: float) -> Iterable[tuple[RequestState, Ending]]:
        """Remove and return the requests that have waited too long, each with its end. Checks
        deadlines only every DEADLINE_CHECK_S.
        """
        if now < self._check_at and not self.scheduled.scheduler.awaits_masks:
            return ()
        return self._expired(now)

    def _expired(self, now: float) -> Iterator[tuple[RequestState, Ending]]:
        yield from self.scheduled.expired(now)
        if now >= self._check_at:
            self._check_at = now + DEADLINE_CHECK_S
            for queue in self._others:
                yield from queue.expired(now)


class SchedulerQueue(Generic[S]):
    """Requests in the scheduler: waiting, running or retracted.

    Attributes:
        backlog: prompts that this node must compute.
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
        state.move(RequestStage.SCHEDULED, self)

    def join(self, state: S, holding: PageHolding) -> bool:
        """Put a request whose KV exists into the running batch. See Scheduler.join."""
        joined = self.scheduler.join(state.request, holding)
        if joined:
            state.move(RequestStage.SCHEDULED, self)
        return joined

    def remove(self, state: S, ending: Ending) -> bool:
        return self.scheduler.abort(state.request, as_request_end(ending)) is not None

    def expired(self, now: float) -> Iterator[tuple[S, Ending]]:
        for finished in self.scheduler.expire(now, self.backlog.queued_s):
            state = self.find(finished.request)
            if state is not None:
                yield state, finished.finish


class PreparationQueue(Protocol):
    """A queue for one kind of resource. Engine thread only."""

    @property
    def name(self) -> str: ...

    def needed_by(self, request: Request) -> bool: ...

    def put(self, request: Request) -> None:
        """Raises ServingError if it cannot get the resource."""
        ...

    def ready(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Remove and yield requests that have the resource (None) or cannot get it (error)."""
        ...

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        ...

    def __len__(self) -> int: ...


class WaitingRequests:
    """The requests of a preparation queue, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None


class PreparationStages(Generic[S]):
    """The resources that a request needs before it is scheduled, with one queue for each.

        put -> guide compiled -> adapter in a slot -> ... -> prepared

    A request enters only the queues whose resource it needs, and holds nothing for which others
    wait. Engine thread only.

    Args:
        backlog: prompts to compute. Their delay is reported to requests that exceed their queue
            limit.
    """

    def __init__(self, backlog: QueueEstimator, *queues: PreparationQueue) -> None:
        self._backlog = backlog
        self._queues = queues
        self._states: dict[int, S] = {}  # by key
        self._prepared: deque[Request] = deque()  # prepared requests that are not yielded yet

    @property
    def num_waiting(self) -> int:
        return len(self._states)

    def lengths(self) -> Mapping[str, int]:
        return {queue.name: len(queue) for queue in self._queues}

    def put(self, state: S) -> None:
        state.move(RequestStage.PREPARING, self)
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
        """Remove and yield requests that have all resources (None) or cannot get one (error)."""
        num_left = -1
        # Loops, because a yielded request may end at once and free resources.
        while self._states and num_left != len(self._states):
            num_left = len(self._states)
            while self._prepared:
                yield self._states.pop(self._prepared.popleft().key), None
            if not self._states:
                return
            for place, queue in enumerate(self._queues, 1):
                for request, refusal in queue.ready(now) if len(queue) else ():
                    try:
                        if refusal is not None:
                            raise refusal
                        if not self._is_prepared(request, self._queues[place:]):
                            continue
                    except ServingError as error:
                        refusal = error
                    yield self._states.pop(request.key), refusal

    def _is_prepared(self, request: Request, queues: tuple[PreparationQueue, ...]) -> bool:
        """Return whether the request needs none of these queues, else add it to the first
        needed.
        """
        queue = next((queue for queue in queues if queue.needed_by(request)), None)
        if queue is not None:
            queue.put(request)
        return queue is None


def _late(request: Request, now: float, backlog: QueueEstimator) -> RequestEnd | None:
    if request.deadline < now:
        return out_of_time()
    return waited_too_long(backlog.queued_s) if request.start_by < now else None


class RequestAdapters(Protocol):
    """The adapters of requests. AdapterManager documents the members."""

    @property
    def num_changes(self) -> int: ...

    def hold(self, request: Request) -> None: ...

    def take_slot(self, request: Request) -> bool: ...

    def release(self, key: int) -> None: ...


class AdapterQueue:
    """Requests whose adapter has no slot on the device yet. Engine thread only.

    They hold nothing else, and delay only requests of adapters without a slot. They are served in
    queue order. If one has waited too long, requests whose adapter has a slot no longer overtake
    it. The running requests then end and free a slot.
    """

    name = "adapter"

    def __init__(self, adapters: RequestAdapters) -> None:
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
        # Loops, because a request that gets a slot may end at once.
        while self._tried != self._changes:
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


class Grammars(Protocol):
    """The grammars of a model. GrammarCache documents the methods."""

    def compiled(self, guide: GuidedDecoding) -> Future[CompiledGuide]: ...

    def match(self, compiled: CompiledGuide, request: Request) -> Match: ...


class GrammarQueue:
    """Requests whose grammar is being compiled, or whose first mask is being computed. They hold
    nothing, and no other request waits for them. Engine thread only.
    """

    name = "grammar"

    def __init__(self, guides: Grammars) -> None:
        self._guides = guides
        self._waiting: dict[int, tuple[Request, Future[CompiledGuide]]] = {}  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        return request.sampling.guide is not None

    def put(self, request: Request) -> None:
        """Raises Overloaded if too many grammars wait."""
        guide = request.sampling.guide
        assert guide is not None
        self._waiting[request.key] = request, self._guides.compiled(guide)

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def ready(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        for key, (request, compiled) in list(self._waiting.items()):
            if not compiled.done():
                continue
            error = compiled.exception() or self._error_of_match(request, compiled.result())
            if error is None and (request.match is None or not request.match.ready):
                continue
            del self._waiting[key]
            if error is not None and not isinstance(error, ServingError):
                raise error
            yield request, error

    def _error_of_match(self, request: Request, compiled: CompiledGuide) -> InvalidRequest | None:
        """Start or poll the request's match. Returns its error, if it has one."""
        match = request.match
        if match is None:
            request.match = self._guides.match(compiled, request)
            return None
        if match.busy:
            match.look()
        return InvalidRequest(match.fault) if match.fault else None


class TierLoadQueue(WaitingRequests):
    """Requests whose prefix is loaded from an offload tier into the prefix cache. Engine thread
    only.

    The copy holds the pages, and the requests hold nothing. When the copy ends, successful or not,
    a request continues with what the tree has.
    """

    name = "offload_load"

    def __init__(self, tiers: CacheTiers, scheduler: Scheduler) -> None:
        super().__init__()
        self._tiers = tiers
        self._scheduler = scheduler
        self._matches: dict[int, TierMatch] = {}  # by key, of requests for which `put` follows
        self._over: list[int] = []  # keys to yield

    def needed_by(self, request: Request) -> bool:
        """Return whether enough of its prefix is in an offload tier to load it."""
        match = self._tiers.match(request.reusable_tokens, request.namespace)
        if match is not None:
            self._matches[request.key] = match
        return match is not None

    def put(self, request: Request) -> None:
        """Add a request, directly after `needed_by` returned True."""
        key = request.key
        self._waiting[key] = request

        def over() -> None:
            if key in self._waiting:
                self._over.append(key)

        room = self._scheduler.free_capacity().num_pages
        if self._tiers.load_match(self._matches.pop(key), room, over):
            request.loads.append(time.monotonic())
        else:
            over()

    def ready(self, now: float) -> Iterator[tuple[Request, None]]:
        over, self._over = self._over, []
        for key in over:
            request = self._waiting.pop(key, None)
            if request is not None:
                request.note_loaded(time.monotonic())
                yield request, None


class Fetches(Protocol):
    """Data for which requests wait, by their keys."""

    @property
    def waits(self) -> Container[int]:
        """Return the keys of the requests that wait for a fetch in progress."""
        ...

    def take_over(self) -> Sequence[int]:
        """Remove and return the keys of the requests that need no longer wait."""
        ...


class FetchQueue(WaitingRequests):
    """The queue for fetches of one kind. Engine thread only."""

    def __init__(self, name: str, fetches: Fetches) -> None:
        super().__init__()
        self.name = name
        self._fetches = fetches

    def needed_by(self, request: Request) -> bool:
        """Return whether the request waits for a fetch in progress."""
        return request.key in self._fetches.waits

    def put(self, request: Request) -> None:
        self._waiting[request.key] = request

    def ready(self, now: float) -> Iterator[tuple[Request, None]]:
        """Remove and yield the requests whose fetch has ended, successfully or not."""
        for key in self._fetches.take_over():
            request = self._waiting.pop(key, None)
            if request is not None:
                yield request, None
