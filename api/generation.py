"""One generation request, from its arrival to its last text, for every client protocol.

Includes admission control: slots and queue, deadline, and priority.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple

from api.auth.client import Client
from api.auth.fair_slots import FairShareLimiter
from api.requests import validation
from api.requests.answer import (
    FinalChunk,
    Offer,
    OutputChunk,
    ResponseBuilder,
    Write,
)
from api.requests.generate_params import GenerateParams, TokenizedRequest
from api.requests.served_model import ServedModel
from api.text.tokenizer import Detokenizer
from common.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, RateLimited
from common.limits import LOWEST
from router.cluster.cluster import SHUTTING_DOWN, Cluster
from router.generation import Generation
from router.policy.load import RequestDue
from router.record import RequestRecord, RequestRecords
from router.token_buffer import ModelVersion, NodeOutput


class RequestLimiter:
    """Admission control: at most `max_requests` live requests, shared fairly between clients."""

    def __init__(self, max_requests: int, *, longest_wait_s: float = 0.0) -> None:
        self.max_requests = max_requests
        self._slots = FairShareLimiter(max_requests, longest_wait_s=longest_wait_s)
        self._num_here = 0  # live and queued requests
        self.leaving = False  # this router is shutting down
        self._closed = False  # no more requests are admitted
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def num_live(self) -> int:
        return self._slots.num_taken

    @property
    def num_waiting(self) -> int:
        return self._slots.num_waiting

    @asynccontextmanager
    async def admitted(self, client: Client, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within this context.

        Raises:
            NodeUnavailable: the router is shutting down.
            RateLimited: the client has as many requests as its key allows.
            Overloaded: no slot became free for this client in time.
        """
        if self._closed:
            raise NodeUnavailable(SHUTTING_DOWN)
        allowed = client.usage.limits.concurrent
        if allowed is not None and self._slots.num_of(client) >= allowed:
            client.usage.refused()
            raise RateLimited(f"this key has {allowed} running requests, which is its limit")
        self._num_here += 1
        self._none_left.clear()
        try:
            await self._slots.acquire(client, priority)
            try:
                yield
            finally:
                self._slots.release(client)
        finally:
            self._num_here -= 1
            if not self._num_here:
                self._none_left.set()

    def leave(self) -> None:
        """Report that this router is shutting down, but keep serving new requests."""
        self.leaving = True

    def close(self) -> None:
        """Reject all further requests and all waiting ones."""
        self.leaving = self._closed = True
        self._slots.close(NodeUnavailable(SHUTTING_DOWN))

    async def wait_until_none_live(self) -> None:
        await self._none_left.wait()


def new_request_id() -> str:
    """Return 128 random bits in hex, unique across routers. Not a secret: it can be guessed."""
    return f"{random.getrandbits(128):032x}"


class TimeBudget(NamedTuple):
    """The time that requests have.

    Attributes:
        total_s: longest total time of a request, in seconds. A request may set a shorter one.
        queue_share: share of its total time that a request may wait in nodes' queues.
    """

    total_s: float
    queue_share: float = 1.0


# Replaces asyncio.timeout at a third of its cost, and raises the error for clients.
class DeadlineScope:
    """The total budget of a request: a context that cancels its work at the deadline.

    For one task and one use. Its value is the deadline in time.monotonic() seconds.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._expired = False
        self._task: asyncio.Task[object]
        self._timer: asyncio.TimerHandle
        self._cancelling = 0

    def __enter__(self) -> float:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer = task.get_loop().call_later(self._budget_s, self._expire)
        return time.monotonic() + self._budget_s

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise DeadlineExceeded if only this limit has cancelled the work."""
        self._timer.cancel()
        if not self._expired:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            sentence = f"the request's total budget of {self._budget_s:g} s is spent"
            raise DeadlineExceeded(sentence) from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


# High-priority requests delay others, so clients may only lower their priority unless an operator
# allows more.
class PriorityLimits:
    def __init__(self, highest: int = 0, *, low_values_first: bool = False) -> None:
        self._highest = highest
        self._low_values_first = low_values_first

    def decide(self, requested: int | None, client: Client) -> int:
        """Return the priority of a request.

        Args:
            requested: the client's value. None: not set. Many clients send 0 by default, so 0 does
                not raise a lower default.

        Raises:
            InvalidRequest: the value is above the client's limit or below the lowest priority.
        """
        highest = self._highest if client.priority is None else client.priority
        if requested is None:
            return highest
        if requested == 0:
            return min(highest, 0)
        priority = -requested if self._low_values_first else requested
        if not LOWEST <= priority <= highest:
            ends = (-highest, -LOWEST) if self._low_values_first else (LOWEST, highest)
            raise InvalidRequest(f"priority must be in [{ends[0]}, {ends[1]}], got {requested}")
        return priority


class Dispatcher:
    """Runs generation requests: admission, validation, placement, response. For one event loop.

    Args:
        returns_cached_tokens: clients see the number of cached prompt tokens.
        priorities: priorities that clients may request. By default they may only lower theirs.
        stream_interval: default number of tokens of an event.
    """

    def __init__(
        self,
        model: ServedModel,
        cluster: Cluster,
        admission: RequestLimiter,
        records: RequestRecords,
        *,
        budget: TimeBudget,
        returns_cached_tokens: bool = True,
        priorities: PriorityLimits | None = None,
        stream_interval: int = 1,
    ) -> None:
        self._model = model
        self._cluster = cluster
        self._admission = admission
        self._records = records
        self._budget = budget
        self._returns_cached_tokens = returns_cached_tokens
        self._priorities = priorities or PriorityLimits()
        self._stream_interval = stream_interval

    async def generate(
        self,
        request: GenerateParams,
        client: Client,
        write: Write,
        traceparent: str = "",
        offer: Offer = lambda piece: False,
    ) -> None:
        """Call `write` until the FinalChunk is written.

        Tokens that arrive during a `write` go into the next piece. Cancelling this call cancels the
        request on its nodes.

        Args:
            client: the authenticated client. Its limits are not checked yet.
            traceparent: header from the client.
            offer: called with each piece except the last. If it returns False, `write` is called.

        Raises:
            ServingError: the request failed, and there is no last piece.
        """
        request_id = request.request_id or new_request_id()
        label = request.label[: validation.MAX_LABEL_CHARACTERS]  # for logs, in case it is too long
        with self._records.begin(request_id, label, client.name, traceparent) as record:
            validation.check_label(request.label)
            budget_s = validation.budget_s(request.timeout_s, self._budget.total_s)
            priority = self._priorities.decide(request.priority, client)
            with DeadlineScope(budget_s) as deadline:
                async with self._admission.admitted(client, priority):
                    queue_s = budget_s * self._budget.queue_share
                    due = RequestDue(time.monotonic() + queue_s, deadline, priority)
                    self._cluster.check_in_time(due)
                    job = await validation.parse(
                        request,
                        request_id,
                        self._model.prompts,
                        self._model.limits,
                        client,
                        priority,
                        self._cluster.adapters.of(request.adapter),
                        self._stream_interval,
                    )
                    record.timeline.tokenized = time.monotonic()
                    sink = ResponseSink(self._builder(job, request), write, offer, record, client)
                    cluster, session_id = self._cluster, request.session_id
                    await Generation(job.spec, due, sink, record, cluster, session_id).run()
                    # After the Cancel to the node, so that a slow client does not delay it.
                    record.finish(sink.last.finish_reason, sink.last.cached_tokens)
                    await sink.flush()

    def _builder(self, job: TokenizedRequest, request: GenerateParams) -> ResponseBuilder:
        tokenizer = self._model.tokenizer
        return ResponseBuilder(
            job,
            Detokenizer(tokenizer, tokenizer.some_text, tokenizer.spelt(request.shown)),
            tokenizer.spelling,
            silent=request.silent,
            returns_cached_tokens=self._returns_cached_tokens,
        )


class ResponseSink:
    """Passes the tokens of a Generation to the client as pieces of a response: its TokenSink."""

    def __init__(
        self,
        builder: ResponseBuilder,
        write: Write,
        offer: Offer,
        record: RequestRecord,
        client: Client,
    ) -> None:
        self.token_ids = builder.token_ids
        self.ended = False
        self.last: FinalChunk  # set once it has ended
        self._builder = builder
        self._write = write
        self._offer = offer
        self._record = record
        self._client = client
        self._piece: OutputChunk

    @property
    def version(self) -> ModelVersion:
        return self._builder.version

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        self._builder.note_cached_tokens(cached_tokens)

    def add(self, output: NodeOutput) -> bool:
        piece = self._piece = self._builder.add(output)
        num_tokens = len(piece.token_ids)
        self._record.write(num_tokens)
        self._client.usage.generated(num_tokens)
        if isinstance(piece, FinalChunk):
            self.ended, self.last = True, piece
            return True
        return not self._offer(piece)

    async def flush(self) -> None:
        await self._write(self._piece)
