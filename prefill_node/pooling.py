"""Pooling calls of a prefill node: each prompt is a request that ends with its last chunk.

The prompts of a call enter the scheduler together and share its queue with hand-offs. The response
is sent when all are computed, or with the first error.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from grpc import StatusCode

from common.errors import NodeUnavailable, Overloaded, ServingError
from common.queueing import QueueEntry, may_wait_s
from common.request import RequestSpec
from common.requests.sampling import SamplingParams
from engine.batch.limits import RequestLimits, TokenBudget
from engine.batch.request import FinishReason, Ints, Request, RequestEnd
from engine.scheduler.scheduler import ChunkDone
from node.control.engine_control import EngineControl
from node.messages import PoolingDone, SubmitPooling
from node.queues import SchedulerQueue
from node.request_state import Claim, Ending, RequestState, as_request_end

# For requests whose token is discarded.
NO_TOKEN = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_LEFT = RequestEnd(FinishReason.ABORT, "the caller has disconnected")


@dataclass(slots=True, eq=False)
class _Call:
    """A SubmitPooling call in progress."""

    number: int
    request_id: str
    held: int  # key under which its tokens are counted
    prompts: "list[PooledPrompt]" = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)  # by request key


@dataclass(slots=True, eq=False, kw_only=True)
class PooledPrompt(RequestState):
    """A prompt of a pooling call."""

    call: _Call


class PoolingCalls:
    """The pooling calls in progress. Engine thread only.

    Args:
        tokens, scheduled: shared with hand-offs.
        keys: unused keys, see keys_of_others.
    Attributes:
        prompts: prompts without a vector, by key.
    """

    def __init__(
        self,
        scheduled: SchedulerQueue[RequestState],
        *,
        limits: RequestLimits,
        max_waiting: int,
        tokens: TokenBudget,
        control: EngineControl,
        keys: Iterator[int],
    ) -> None:
        self._scheduled = scheduled
        self._limits = limits
        self._max_waiting = max_waiting
        self._tokens = tokens
        self._control = control
        self._keys = keys
        self._calls: dict[int, _Call] = {}  # by call number
        self.prompts: dict[int, PooledPrompt] = {}
        self.num_pooled = 0  # prompts since the start

    def find(self, request: Request) -> PooledPrompt | None:
        """Return the state of a prompt without a vector."""
        return self.prompts.get(request.key)

    def submit(self, message: SubmitPooling) -> None:
        call = _Call(message.number, message.request_id, next(self._keys))
        try:
            self._begin(call, message)
        except ServingError as error:
            self._end(call)
            self._refuse(call, str(error), error.status, error.late_s)

    def cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            self._end(call)

    def abort(self, request_id: str) -> int:
        """Abort the calls of a request. Returns the number of aborted prompts."""
        calls = [call for call in self._calls.values() if call.request_id == request_id]
        return self._abort(calls, "aborted by an operator")

    def abort_all(self, sentence: str) -> int:
        """Abort all calls. Returns the number of aborted prompts."""
        return self._abort(tuple(self._calls.values()), sentence)

    def update_waiting_requests(self) -> None:
        """Compute queued prompts with the new weights. Calls that already have some of their
        vectors fail instead.
        """
        for call in tuple(self._calls.values()):
            if call.vectors:
                self._end(call)
                self._refuse(call, "the weights of this node have changed", StatusCode.UNAVAILABLE)
            for prompt in call.prompts:
                prompt.request.compute_with(self._control.weights)

    def _abort(self, calls: Iterable[_Call], sentence: str) -> int:
        num_prompts = 0
        for call in calls:
            self._end(call)
            self._refuse(call, sentence, StatusCode.CANCELLED)
            num_prompts += len(call.prompts)
        return num_prompts

    def computed(self, chunk: ChunkDone) -> None:
        """Record a computed chunk, and send the result when all prompts of the call are done. No
        effect for a request that is not a prompt here."""
        request = chunk.request
        prompt = self.prompts.get(request.key)
        if prompt is None:
            return
        self._scheduled.backlog.serve(request.key, len(request.token_ids) - chunk.end)
        if chunk.pooled is None:
            return
        del self.prompts[request.key]
        call = prompt.call
        call.vectors[request.key] = chunk.pooled.astype("<f4").tobytes()
        self.num_pooled += 1
        if len(call.vectors) == len(call.prompts):
            self._end(call)
            vectors = tuple(call.vectors[each.key] for each in call.prompts)
            cached = sum(each.request.cached_tokens for each in call.prompts)
            self._control.notify(PoolingDone(call.number, vectors, cached))

    def _begin(self, call: _Call, message: SubmitPooling) -> None:
        """Check and schedule a call's prompts. On a ServingError the caller releases
        `call.held`.
        """
        if self._control.draining:
            raise NodeUnavailable("this prefill node is draining")
        self._limits.check_pooling(message.pooling)
        prompts = [
            np.frombuffer(token_ids, "<i4").astype(np.int32) for token_ids in message.prompts
        ]
        for token_ids in prompts:
            self._limits.check(token_ids)
        num_waiting = self._scheduled.num_waiting
        if num_waiting and num_waiting + len(prompts) > self._max_waiting:
            raise Overloaded(f"{num_waiting} prompts wait here already")
        now, num_tokens = time.monotonic(), sum(map(len, prompts))
        work_s = num_tokens * self._scheduled.backlog.unit_s
        start_by = now + may_wait_s(message.queue_s, message.budget_s, work_s)
        self._scheduled.backlog.check(QueueEntry(start_by, num_tokens), now)
        self._tokens.take(call.held, num_tokens)
        self._calls[call.number] = call
        for token_ids in prompts:
            self._add(call, self._request(message, token_ids, now, start_by))

    def _request(
        self, message: SubmitPooling, token_ids: Ints, now: float, start_by: float
    ) -> Request:
        spec = RequestSpec(
            request_id=message.request_id,
            token_ids=token_ids.tobytes(),
            sampling=NO_TOKEN,
            namespace=message.namespace,
            engine_crashes=message.engine_crashes,
        )
        return Request.of(
            spec,
            key=next(self._keys),
            deadline=now + message.budget_s,
            arrived=now,
            start_by=start_by if message.queue_s < math.inf else math.inf,
            weights=self._control.weights,
            pooling=message.pooling,
        )

    def _add(self, call: _Call, request: Request) -> None:
        prompt = PooledPrompt(request=request, on_end=self._ended, call=call)
        backlog = self._scheduled.backlog
        self._scheduled.put(prompt)
        call.prompts.append(prompt)
        self.prompts[request.key] = prompt
        backlog.join(request.key, QueueEntry(request.due, len(request.token_ids)), request.arrived)
        prompt.claims.add(Claim.BACKLOG, partial(backlog.leave, request.key))

    def _ended(self, prompt: PooledPrompt, ending: Ending) -> None:
        """End the call of a prompt that ended without a vector."""
        if self.prompts.pop(prompt.key, None) is not None:
            end = as_request_end(ending)
            self._end(prompt.call)
            sentence = end.error or end.reason.name.lower()
            self._refuse(prompt.call, sentence, end.status, end.retry_after_s)

    def _end(self, call: _Call) -> None:
        """Remove a call. Prompts in progress stop after their chunk."""
        self._calls.pop(call.number, None)
        self._tokens.drop(call.held)
        for prompt in call.prompts:
            if self.prompts.pop(prompt.key, None) is not None:
                self._scheduled.remove(prompt, _LEFT)
            prompt.close(_LEFT)

    def _refuse(
        self, call: _Call, sentence: str, status: StatusCode, retry_after_s: float = 0.0
    ) -> None:
        code = status.value[0] or StatusCode.CANCELLED.value[0]
        self._control.notify(PoolingDone(call.number, (), 0, sentence, code, retry_after_s))
