"""Which requests are live: how many, whose turn it is, when none is left."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.auth.client import Client
from api.auth.fair_slots import FairSlots
from common.errors import NodeUnavailable, RateLimited
from router.cluster.cluster import SHUTTING_DOWN


class Admission:
    """A request is live from its admission to the end of its call, whatever becomes of it."""

    def __init__(self, max_requests: int, *, longest_wait_s: float = 0.0) -> None:
        """
        Args:
            longest_wait_s: for a slot, where a client cannot have one at once.
        """
        self.max_requests = max_requests
        self._slots = FairSlots(max_requests, longest_wait_s=longest_wait_s)
        self._num_here = 0  # requests that are live, or wait
        self.leaving = False  # this router ends
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
        """The request is live inside.

        Raises:
            NodeUnavailable: the router is shutting down.
            RateLimited: the client has as many requests as its key may.
            Overloaded: as many requests are live as the client can have now.
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
        """This router ends, and says so, but serves what still reaches it."""
        self.leaving = True

    def close(self) -> None:
        """Refuses every request from now on, and those that wait."""
        self.leaving = self._closed = True
        self._slots.close(NodeUnavailable(SHUTTING_DOWN))

    async def wait_until_none_live(self) -> None:
        await self._none_left.wait()


def new_request_id() -> str:
    """Of 128 random bits, so that no two routers make the same. Nobody may rely on its being hard
    to guess."""
    return f"{random.getrandbits(128):032x}"
