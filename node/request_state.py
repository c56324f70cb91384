"""The record of one request on a node: its stage, its queue and its claims.

    prefill node  NEW -> BOOTSTRAP -> PREPARING -> SCHEDULED -> INFLIGHT
    decode node   NEW -> PREPARING -> placed
                  FETCHING -> SCHEDULED, PREALLOC    PREALLOC -> TRANSFER, placed
                  PAUSED, UNPAIRED -> placed         TRANSFER -> SCHEDULED, placed
                  SCHEDULED <-> MIGRATING

"placed" is PAUSED, UNPAIRED, FETCHING, PREALLOC or SCHEDULED. Every stage may go to CLOSED. Pooling
prompts begin in SCHEDULED. Waiting, running and retracted are states inside the scheduler.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from common.errors import EngineFault, ServingError
from engine.batch.limits import (
    MAX_HELD_EMBEDDING_BYTES,
    MAX_HELD_STATE_BYTES,
    RequestLimits,
    TokenBudget,
)
from engine.batch.request import FinishReason, Request, RequestEnd


class Claim(StrEnum):
    """The resources that a request can claim."""

    TOKENS = "tokens"  # part of the token budget
    STATES = "states"  # part of the budget of hidden states and routed experts
    EMBEDDINGS = "embeddings"  # part of the budget of input embeddings
    BACKLOG = "backlog"  # an entry of the prompt backlog
    ADAPTER = "adapter"  # its adapter in host memory, and perhaps in a slot
    TICKET = "ticket"  # ticket with which another node may continue it
    FETCH = "fetch"  # a prefix that is or was being fetched
    IMAGES = "images"  # embeddings of its images that are or were being read
    RESERVATION = "reservation"  # pages for KV from another node
    MIGRATION = "migration"  # the hand-off of its migration to another node


class Claims:
    """The resources that a request holds, with functions to release them. Engine thread only."""

    __slots__ = ("_releases",)

    def __init__(self) -> None:
        self._releases: dict[Claim, Callable[[], object]] = {}

    def add(self, claim: Claim, release: Callable[[], object]) -> None:
        """Add a claim that the request does not have."""
        self._releases[claim] = release

    def release(self, claim: Claim) -> None:
        """Release a claim early. No effect if the request does not have it."""
        release = self._releases.pop(claim, None)
        if release is not None:
            release()

    def hand_over(self, claim: Claim) -> None:
        """Remove a claim without releasing it, because another component holds it from now on."""
        del self._releases[claim]

    def close(self) -> None:
        """Release all claims, the last one first."""
        while self._releases:
            _, release = self._releases.popitem()
            release()


class RequestStage(StrEnum):
    NEW = "new"
    BOOTSTRAP = "bootstrap"
    PREPARING = "preparing"
    PAUSED = "paused"
    UNPAIRED = "unpaired"
    FETCHING = "fetching"
    PREALLOC = "prealloc"
    TRANSFER = "transfer"
    SCHEDULED = "scheduled"
    MIGRATING = "migrating"
    INFLIGHT = "inflight"
    CLOSED = "closed"


_PLACED = frozenset(
    {
        RequestStage.PAUSED,
        RequestStage.UNPAIRED,
        RequestStage.FETCHING,
        RequestStage.PREALLOC,
        RequestStage.SCHEDULED,
    }
)
_NEXT: Mapping[RequestStage, frozenset[RequestStage]] = {
    RequestStage.NEW: frozenset(
        {RequestStage.BOOTSTRAP, RequestStage.PREPARING, RequestStage.SCHEDULED}
    ),
    RequestStage.BOOTSTRAP: frozenset({RequestStage.PREPARING}),
    RequestStage.PREPARING: _PLACED,
    RequestStage.PAUSED: _PLACED,
    RequestStage.UNPAIRED: _PLACED,
    RequestStage.FETCHING: frozenset({RequestStage.SCHEDULED, RequestStage.PREALLOC}),
    RequestStage.PREALLOC: _PLACED | {RequestStage.TRANSFER},
    RequestStage.TRANSFER: _PLACED,
    RequestStage.SCHEDULED: frozenset({RequestStage.MIGRATING, RequestStage.INFLIGHT}),
    RequestStage.MIGRATING: frozenset({RequestStage.SCHEDULED}),
    RequestStage.INFLIGHT: frozenset(),
    RequestStage.CLOSED: frozenset(),
}

# How a request ends: finished or stopped by a limit (RequestEnd), or rejected with an error.
Ending: TypeAlias = RequestEnd | ServingError


def as_request_end(ending: Ending) -> RequestEnd:
    """Return the end that the client sees."""
    if isinstance(ending, RequestEnd):
        return ending
    return RequestEnd(FinishReason.ERROR, str(ending), ending.status, ending.late_s)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on a node, from its arrival to its end. Engine thread only.

    Attributes:
        request: the scheduler's record.
        on_end: called once with the state and its end, before the claims are released.
        queue: the queue that has the request, if any.
    """

    request: Request
    on_end: Callable[[Any, Ending], None]
    claims: Claims = field(default_factory=Claims)
    stage: RequestStage = RequestStage.NEW
    queue: "RequestQueue[Any] | None" = None
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.request.key

    def move(self, stage: RequestStage, queue: "RequestQueue[Any] | None") -> None:
        """Enter a stage. Raises EngineFault if it cannot follow the current one."""
        if stage not in _NEXT[self.stage]:
            raise EngineFault(
                f"request {self.key} cannot go from {self.stage.value} to {stage.value}"
            )
        self.stage, self.queue = stage, queue

    def close(self, ending: Ending) -> None:
        """Report the end and release the claims. No effect on a closed request."""
        if self.stage is RequestStage.CLOSED:
            return
        self.stage, self.queue = RequestStage.CLOSED, None
        self.on_end(self, ending)
        self.claims.close()


class HeldBytes:
    """Budgets for bytes that requests hold in addition to KV. Engine thread only."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._embeddings = TokenBudget(MAX_HELD_EMBEDDING_BYTES, "bytes of input embeddings")
        self._states = TokenBudget(
            MAX_HELD_STATE_BYTES, "bytes of hidden states and routed experts"
        )

    def hold(self, state: RequestState, *, times: int = 1) -> None:
        """Count the bytes of a request until it ends. Raises Overloaded, see TokenBudget.take."""
        spec, key = state.request.spec, state.key
        if (given := spec.input_embeddings) is not None:
            self._embeddings.take(key, len(given.values), times=times)
            state.claims.add(Claim.EMBEDDINGS, partial(self._embeddings.drop, key))
        if num_bytes := self._limits.state_bytes(spec):
            self._states.take(key, num_bytes, times=times)
            state.claims.add(Claim.STATES, partial(self._states.drop, key))


S = TypeVar("S", bound=RequestState)


class RequestQueue(Protocol[S]):
    """A queue of requests on a node. Engine thread only."""

    @property
    def num_waiting(self) -> int:
        """Number of its requests that count towards the limit of queued requests."""
        ...

    def put(self, state: S, /) -> None:
        """Add a request and move it to the stage of this queue.

        Raises:
            ServingError: it cannot get what it would wait for.
        """
        ...

    def remove(self, state: S, ending: Ending, /) -> bool:
        """Remove a request because it ends. Returns False if a launched step contains it, whose
        result then ends it.
        """
        ...

    def expired(self, now: float, /) -> Iterable[tuple[S, Ending]]:
        """Remove and return requests that have waited too long, each with its end."""
        ...

    def lengths(self) -> Mapping[str, int]:
        """Return the number of requests, by name of the queue or of its parts."""
        ...
