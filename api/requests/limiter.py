"""Admission control: the number of live requests, their queue, and the end of the last one."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.auth.client import Client
from api.auth.fair_slots import FairShareLimiter
from common.errors import NodeUnavailable, RateLimited
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
            raise RateLimited(f"this key has {allowed} live requests, as many as it may have")
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
        """Reject all further requests, and those that wait."""
        self.leaving = self._closed = True
        self._slots.close(NodeUnavailable(SHUTTING_DOWN))

    async def wait_until_none_live(self) -> None:
        await self._none_left.wait()


def new_request_id() -> str:
    """Return 128 random bits in hex, unique across routers.

    It is not a secret: it can be guessed.
    """
    return f"{random.getrandbits(128):032x}"
