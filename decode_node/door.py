"""What a submission must be to be taken: the cheapest question first, and nothing is held before
all are answered but what its end lets go of."""

import itertools
import math
import time

import numpy as np

from common.engine.adapters.adapters import Adapters
from common.engine.rows.limits import RequestLimits
from common.engine.rows.request import Request
from common.errors import InvalidRequest, NodeUnavailable, Overloaded
from common.node.desk.desk import Desk
from common.node.messages import SubmitRequest
from common.node.stamps import RequestStamps
from common.queueing.drain import Drain, may_wait_s
from common.requests.adapter import within
from decode_node.answer_pace import AnswerPace
from decode_node.live import LiveRequests
from decode_node.prefix_holders import PrefixHolders

# As many requests and tokens may wait here before one is refused whose client has tokens already:
# all that another node had, when that one dies.
REPLAYS_TIMES = 2


class Door:
    """Engine thread only.

    Args:
        max_waiting: requests.
        prompts: those to be computed here.
        answers: how long they take here.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        limits: RequestLimits,
        desk: Desk,
        live: LiveRequests,
        adapters: Adapters,
        holders: PrefixHolders,
        prompts: Drain,
        answers: AnswerPace,
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
        """Its record, and the first of its stamps: whatever becomes of it, its end is told."""
        now = time.monotonic()
        token_ids = np.frombuffer(message.token_ids, np.int32)
        request = Request(
            key=next(self._keys),
            origin=(message.stream, message.request),
            request_id=message.request_id,
            token_ids=token_ids,
            num_prompt=len(token_ids) - message.num_generated,
            sampling=message.sampling,
            deadline=now + message.budget_s,
            arrived=now,
            start_by=now + self._may_wait_s(message, len(token_ids)),
            priority=message.priority,
            routing_key=message.routing_key,
            client=message.client,
            client_weight=message.client_weight,
            shared_in=within(message.namespace, message.adapter),
            adapter=message.adapter,
            prediction=np.frombuffer(message.prediction, np.int32) if message.prediction else None,
            images=message.images,
        )
        request.compute_with(self._desk.weights)
        request.suspect_of(message.engine_deaths)
        stamps = RequestStamps(
            message.request_id,
            request.num_prompt,
            message.trace,
            message.received or now,
            now,
            num_generated=message.num_generated,
        )
        self._live.begin(request, stamps)
        return request

    def take(self, request: Request, message: SubmitRequest, num_waiting: int) -> None:
        """Lets in one that was met.

        Args:
            num_waiting: requests that wait here already.

        Raises:
            ServingError: it may not come in.
        """
        if self._live.get(request.origin) is not None:
            raise InvalidRequest(f"request {message.request} is live on this stream already")
        if self._desk.draining:
            raise NodeUnavailable("this decode node is draining")
        times = REPLAYS_TIMES if message.num_generated else 1
        if num_waiting >= times * self._max_waiting:
            raise Overloaded(f"{num_waiting} requests wait here already")
        self._limits.check(request.token_ids, message.images)
        self._limits.check_sampling(message.sampling, message.images)
        if request.prediction is not None:
            self._limits.check_prediction(request.prediction)
        self._adapters.hold(request)
        prefix_at = () if message.move_from is not None else self._holders.of(request, message)
        self._live.let_in(request, times=times, ticket=message.ticket, prefix_at=prefix_at)

    def _may_wait_s(self, message: SubmitRequest, num_tokens: int) -> float:
        """For its turn; without end, of an answer that goes on: its client has part of it."""
        if message.num_generated:
            return math.inf
        work_s = num_tokens * self._prompts.unit_s
        work_s += self._answers.seconds(message.sampling.max_tokens)
        return may_wait_s(message.queue_s, message.budget_s, work_s)
