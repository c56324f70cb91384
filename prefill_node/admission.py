"""Admission control of a prefill node, and the record and queues of its hand-offs. Used by
handoffs.py.

The checks run before any work is done for a request, the cheapest first.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from common.errors import (
    AdapterNotLoaded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueFull,
    ServingError,
)
from common.queueing import QueueEntry, QueueEstimator, may_wait_s
from common.request import Remaining, RequestSpec
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits, TokenBudget
from engine.batch.request import Request
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import Prompt
from kvtransfer.ports import OpenedEvent
from node.control.engine_control import EngineControl
from node.queues import (
    KeyedQueue,
    PreparationStages,
    RequestAdapters,
    RequestQueues,
    SchedulerQueue,
)
from node.request_state import Claim, HeldBytes, RequestStage, RequestState
from node.timings import ProducerTimings


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillState(RequestState):
    """A hand-off at the prefill node. Its key is the serial of the hand-off.

    Attributes:
        prefix_tokens: tokens whose KV the consumer has already.
        published: tokens [0, published) are published.
        cached_before: cached tokens before this node computed others ahead. Infinite if it computed
            none ahead.
        holding: pages of the whole prompt, once the scheduler has admitted it.
    """

    timings: ProducerTimings
    prefix_tokens: int = 0
    published: int = 0
    cached_before: float = math.inf
    holding: PageHolding | None = None


def is_handoff(request: Request) -> bool:
    """Return whether a request of the scheduler belongs to a hand-off. Serials are positive."""
    return request.key > 0


def keys_of_others() -> Iterator[int]:
    """Return unused negative keys, for requests without a hand-off: pooling prompts and prompts
    computed ahead."""
    return itertools.count(-1, -1)


class BootstrapQueue(KeyedQueue[PrefillState]):
    """Hand-offs that wait for their Grant."""

    stage = RequestStage.BOOTSTRAP

    @property
    def since(self) -> float:
        """Arrival of the first hand-off. Infinite if the queue is empty."""
        return next((state.request.arrived for state in self._states.values()), math.inf)


class InflightQueue(KeyedQueue[PrefillState]):
    """Computed hand-offs whose pages the consumer is reading."""

    stage = RequestStage.INFLIGHT

    @property
    def num_waiting(self) -> int:
        return 0


class PrefillQueues(RequestQueues):
    """The queues of a prefill node. Pooling prompts are only in `scheduled`, and prompts computed
    ahead only in `preparing` and `scheduled`.
    """

    def __init__(
        self,
        preparing: PreparationStages[RequestState],
        scheduled: SchedulerQueue[RequestState],
    ) -> None:
        self.bootstrap = BootstrapQueue()
        self.preparing = preparing
        self.inflight = InflightQueue()
        super().__init__(scheduled, preparing, self.bootstrap, self.inflight)


class NodeDraining(NodeUnavailable):
    """The node is draining and accepts no hand-offs."""


class NodePaused(NodeUnavailable):
    """The node is paused and accepts no hand-offs for now."""


class WeightVersionMismatch(NodeUnavailable):
    """This node has another weight version, so the consumer cannot use its KV."""


_REJECTIONS: Mapping[type, str] = {
    NodeDraining: "draining",
    NodePaused: "paused",
    WeightVersionMismatch: "weights",
    AdapterNotLoaded: "adapter",
    QueueFull: "late",
    Overloaded: "overloaded",
    ServingError: "invalid",
}
COUNTS = tuple(f"refused/{reason}" for reason in _REJECTIONS.values())


def rejection_of(error: ServingError) -> str:
    """Return the name of the reason for a rejection. Only an "invalid" hand-off is rejected by
    every node, now and later.
    """
    return next(_REJECTIONS[kind] for kind in type(error).__mro__ if kind in _REJECTIONS)


class HandoffAdmission:
    """Admission control of the prefill node. Engine thread only.

    Args:
        backlog: granted prompts that are not computed yet.
        tokens: bounded count of the tokens of all prompts without pages.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        limits: RequestLimits,
        scheduler: Scheduler,
        control: EngineControl,
        adapters: RequestAdapters,
        backlog: QueueEstimator,
        tokens: TokenBudget,
    ) -> None:
        self._max_waiting = max_waiting
        self._limits = limits
        self._scheduler = scheduler
        self._control = control
        self._adapters = adapters
        self._backlog = backlog
        self._tokens = tokens
        self._held_bytes = HeldBytes(limits)

    def create_request(self, event: OpenedEvent, spec: RequestSpec, now: float) -> Request:
        """Create the request of a hand-off, which generates only the first token here."""
        request = Request.of(
            spec,
            key=event.serial,
            deadline=now + event.remaining.budget_s,
            arrived=now,
            weights=event.weights,
        )
        request.sampling = replace(spec.sampling, max_tokens=spec.num_generated + 1)
        return request

    def admit(self, state: PrefillState, event: OpenedEvent, num_waiting: int) -> None:
        """Admit a hand-off. Its tokens and its adapter become claims.

        Raises:
            ServingError: the hand-off is rejected. See rejection_of.
        """
        if self._control.draining:
            raise NodeDraining("this prefill node is draining")
        if self._scheduler.paused:
            raise NodePaused("this prefill node is paused")
        if event.weights != self._control.weights:
            raise WeightVersionMismatch("this prefill node has other weights")
        if not isinstance(event.source, Prompt):
            raise InvalidRequest("a prefill node runs no requests")
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} prompts wait here already")
        request, key = state.request, state.key
        self._limits.check_request(request.spec)
        request.start_by = self._start_by(request.spec, event.remaining, request.arrived)
        self._held_bytes.hold(state)
        self._tokens.take(key, request.spec.num_tokens)
        state.claims.add(Claim.TOKENS, partial(self._tokens.drop, key))
        if request.spec.adapter:
            self._adapters.hold(request)
            state.claims.add(Claim.ADAPTER, partial(self._adapters.release, key))

    def _start_by(self, spec: RequestSpec, remaining: Remaining, now: float) -> float:
        """Return the time by which the first forward pass must begin. Infinite for a continued
        response, because the client already has a part of it.

        Raises:
            QueueFull: the prompt would wait longer here.
        """
        if spec.num_generated:
            return math.inf
        work_s = spec.num_tokens * self._backlog.unit_s
        left_s = may_wait_s(remaining.queue_s, remaining.budget_s, work_s)
        self._backlog.check(QueueEntry(now + left_s, spec.num_tokens, spec.priority), now)
        return now + left_s
