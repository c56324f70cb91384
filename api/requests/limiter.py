"""Admission control: slots, queue, deadline and priority of a request."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from api.auth.client import Client
from api.auth.fair_slots import FairShareLimiter
from common.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, RateLimited
from common.priority import LOWEST
from router.cluster.cluster import SHUTTING_DOWN


class RequestLimiter:
    """Admission of requests. A request is live from its admission to the end of its call."""

    def __init__(self, max_requests: int, *, longest_wait_s: float = 0.0) -> None:
        """
        Args:
            longest_wait_s: longest wait for a slot, if a client cannot have one immediately.
        """
        self.max_requests = max_requests
        self._slots = FairShareLimiter(max_requests, longest_wait_s=longest_wait_s)
        self._num_here = 0  # requests that are live or queued
        self.leaving = False  # this router is shutting down
        self._closed = False  # no request is admitted any more
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
        """Keep the request live within this context.

        Raises:
            NodeUnavailable: the router is shutting down.
            RateLimited: the client has as many requests as its key allows.
            Overloaded: the client cannot have another live request now.
        """
        if self._closed:
            raise NodeUnavailable(SHUTTING_DOWN)
        allowed = client.limits.concurrent
        if allowed is not None and self._slots.num_of(client) >= allowed:
            client.usage.refused()
            raise RateLimited(f"this key has {allowed} running requests, which is its limit")
        self._num_here += 1
        self._none_left.clear()
        try:
            await self._slots.take(client, priority)
            try:
                yield
            finally:
                self._slots.give_back(client)
        finally:
            self._num_here -= 1
            if not self._num_here:
                self._none_left.set()

    def leave(self) -> None:
        """Report that this router is shutting down, but serve requests that still arrive."""
        self.leaving = True

    def close(self) -> None:
        """Reject all further requests and all waiting ones."""
        self.leaving = self._closed = True
        self._slots.close(NodeUnavailable(SHUTTING_DOWN))

    async def wait_until_none_live(self) -> None:
        await self._none_left.wait()


def new_request_id() -> str:
    """Return 128 random bits in hex, unique across routers.

    It is not a secret: it can be guessed.
    """
    return f"{random.getrandbits(128):032x}"


# The total budget of a request: a time limit after which its work is cancelled.
#
# Works like asyncio.timeout at a third of its cost, and raises the error for clients.
class DeadlineScope:
    """A context with a time limit, for one task and one use.

    Gives the deadline in time.monotonic() seconds.
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
        """Raise DeadlineExceeded if this limit, and nothing else, has cancelled the work."""
        self._timer.cancel()
        if not self._expired:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            sentence = f"the request's total budget of {self._budget_s:g} s is spent"
            raise DeadlineExceeded(sentence) from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


# The priority of a request, from the client's wish and the operator's limits.
#
# High-priority requests delay others, so clients may only lower their priority unless they are
# allowed more.
class PriorityLimits:
    def __init__(self, highest: int = 0, *, low_values_first: bool = False) -> None:
        """
        Args:
            highest: highest priority of clients without their own limit, and the default of their
                requests.
            low_values_first: whether clients send lower values for higher priorities.
        """
        self._highest = highest
        self._low_values_first = low_values_first

    def decide(self, asked: int | None, client: Client) -> int:
        """Return the priority of a request.

        Args:
            asked: the client's value. None: not set. Clients of other servers send 0 by default, so
                0 does not raise a lower default.

        Raises:
            InvalidRequest: the value is above the client's limit or below the lowest priority.
        """
        highest = self._highest if client.priority is None else client.priority
        if asked is None:
            return highest
        if asked == 0:
            return min(highest, 0)
        priority = -asked if self._low_values_first else asked
        if not LOWEST <= priority <= highest:
            ends = (-highest, -LOWEST) if self._low_values_first else (LOWEST, highest)
            raise InvalidRequest(f"priority must be in [{ends[0]}, {ends[1]}], got {asked}")
        return priority
