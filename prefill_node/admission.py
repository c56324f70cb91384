"""Admission checks for hand-offs, the cheapest first. All checks come before any work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from common.errors import (
    AdapterNotLoaded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueTooLong,
    ServingError,
)
from common.queueing.drain import Drain, may_wait_s
from common.queueing.waiting_line import Place
from common.request import Remaining, RequestSpec
from engine.adapters.adapters import Adapters
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.batch.token_budget import HeldTokens
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import Prompt
from kvtransfer.ports import Opened
from node.control.engine_control import Desk


class Draining(NodeUnavailable):
    """This node is draining and accepts no hand-offs."""


class Paused(NodeUnavailable):
    """This node is paused and accepts no hand-offs for now."""


class OtherWeights(NodeUnavailable):
    """The weights of this node differ, so the consumer cannot use its KV."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rejection of a hand-off.

    Attributes:
        count: name of the counter for this reason.
        retryable: another node may accept it, or this one later.
    """

    count: str
    retryable: bool


_REFUSALS: Mapping[type, Refusal] = {
    Draining: Refusal("refused/draining", retryable=True),
    Paused: Refusal("refused/paused", retryable=True),
    OtherWeights: Refusal("refused/weights", retryable=True),
    AdapterNotLoaded: Refusal("refused/adapter", retryable=True),
    QueueTooLong: Refusal("refused/late", retryable=True),
    Overloaded: Refusal("refused/overloaded", retryable=True),
    ServingError: Refusal("refused/invalid", retryable=False),
}
COUNTS = tuple(refusal.count for refusal in _REFUSALS.values())


def refusal_of(error: ServingError) -> Refusal:
    """Return the rejection for an error, by its nearest base class."""
    return next(_REFUSALS[kind] for kind in type(error).__mro__ if kind in _REFUSALS)


class Door:
    """Admission control of the prefill node. Engine thread only.

    Args:
        max_waiting: limit of queued prompts.
        prompts: queue of prompts that are granted and not computed yet.
        tokens: bounded count of tokens of all prompts without pages.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        limits: RequestLimits,
        scheduler: Scheduler,
        desk: Desk,
        adapters: Adapters,
        prompts: Drain,
        tokens: HeldTokens,
    ) -> None:
        self._max_waiting = max_waiting
        self._limits = limits
        self._scheduler = scheduler
        self._desk = desk
        self._adapters = adapters
        self._prompts = prompts
        self._tokens = tokens

    def take(self, event: Opened, num_waiting: int, now: float) -> Request:
        """Admit a hand-off and hold its tokens and its adapter.

        Args:
            num_waiting: prompts that are queued here already.
        Raises:
            ServingError: it is rejected. See refusal_of.
        """
        if self._desk.draining:
            raise Draining("this prefill node is draining")
        if self._scheduler.paused:
            raise Paused("this prefill node is paused")
        if event.weights != self._desk.weights:
            raise OtherWeights("this prefill node has other weights")
        if not isinstance(event.source, Prompt):
            raise InvalidRequest("a prefill node runs no requests")
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} prompts wait here already")
        spec = event.source.spec
        self._limits.check_request(spec)
        request = Request.of(
            spec,
            key=event.serial,
            deadline=now + event.remaining.budget_s,
            arrived=now,
            start_by=self._start_by(spec, event.remaining, now),
            weights=event.weights,
        )
        # This node samples the first token only.
        request.sampling = replace(spec.sampling, max_tokens=spec.num_generated + 1)
        self._tokens.take(event.serial, spec.num_tokens)
        self._adapters.hold(request)
        return request

    def _start_by(self, spec: RequestSpec, remaining: Remaining, now: float) -> float:
        """Return the time by which its first forward pass must begin.

        Infinite for a continued response, which a client has in part.

        Raises:
            QueueTooLong: the queue here takes longer.
        """
        if spec.num_generated:
            return math.inf
        work_s = spec.num_tokens * self._prompts.unit_s
        left_s = may_wait_s(remaining.queue_s, remaining.budget_s, work_s)
        self._prompts.check(Place(now + left_s, spec.num_tokens, spec.priority), now)
        return now + left_s
