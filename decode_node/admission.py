"""Admission checks for submissions, the cheapest first.

Before all checks pass, a request acquires only resources that its end releases.
"""

import itertools
import math
import time

from common.errors import InvalidRequest, NodeUnavailable, Overloaded
from common.queueing.drain import QueueEstimator, may_wait_s
from decode_node.active_requests import ActiveRequests
from decode_node.output_length import OutputLengthEstimate
from decode_node.prefix_holders import PrefixLocations
from engine.adapters.adapters import AdapterManager
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from node.control.engine_control import EngineControl
from node.messages import SubmitRequest
from node.timings import RequestTimings

# Multiple of the queue limits for replayed requests, whose clients have tokens already: another
# node that fails may send all of its requests here.
REPLAYS_TIMES = 2


class RequestAdmission:
    """Admission control of the decode node. Engine thread only.

    Args:
        max_waiting: limit of queued requests.
        prompts: queue of prompts to be computed here.
        answers: measured duration of responses.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        limits: RequestLimits,
        desk: EngineControl,
        live: ActiveRequests,
        adapters: AdapterManager,
        holders: PrefixLocations,
        prompts: QueueEstimator,
        answers: OutputLengthEstimate,
    ) -> None:
        self._max_waiting = max_waiting
        self._limits = limits
        self._desk = desk
        self._live = live
        self._adapters = adapters
        self._holders = holders
        self._prompts = prompts
        self._answers = answers
        self._keys = itertools.count(1)

    def meet(self, message: SubmitRequest) -> Request:
        """Create the request's record and start its timings. Its end is always reported."""
        now, spec = time.monotonic(), message.spec
        request = Request.of(
            spec,
            key=next(self._keys),
            origin=(message.stream, message.number),
            deadline=now + message.remaining.budget_s,
            arrived=now,
            start_by=now + self._may_wait_s(message),
            weights=self._desk.weights,
        )
        stamps = RequestTimings(
            spec.request_id,
            spec.num_prompt,
            message.trace,
            message.received or now,
            now,
            num_generated=spec.num_generated,
        )
        self._live.begin(request, stamps)
        return request

    def take(self, request: Request, message: SubmitRequest, num_waiting: int) -> None:
        """Admit a request that `meet` returned.

        Args:
            num_waiting: requests that are queued here already.

        Raises:
            ServingError: the request is rejected.
        """
        if self._live.get(request.origin) is not None:
            raise InvalidRequest(f"request {message.number} is already active on this stream")
        if self._desk.draining:
            raise NodeUnavailable("this decode node is draining")
        spec, placement = message.spec, message.placement
        times = REPLAYS_TIMES if spec.num_generated else 1
        if num_waiting >= times * self._max_waiting:
            raise Overloaded(f"the queue is full ({num_waiting} requests)")
        self._limits.check_request(spec)
        self._adapters.hold(request)
        hints = () if placement.move_from is not None else self._holders.of(request, placement)
        self._live.let_in(request, times=times, ticket=placement.ticket, prefix_at=hints)

    def _may_wait_s(self, message: SubmitRequest) -> float:
        """Return the queue limit in seconds.

        Infinite for a continued response, which a client has in part.
        """
        spec, remaining = message.spec, message.remaining
        if spec.num_generated:
            return math.inf
        work_s = spec.num_tokens * self._prompts.unit_s
        work_s += self._answers.seconds(spec.sampling.max_tokens)
        return may_wait_s(remaining.queue_s, remaining.budget_s, work_s)
