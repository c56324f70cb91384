"""Which requests are live: names that are taken, how many more fit, when none is left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import InvalidRequest, NodeUnavailable, Overloaded

SHUTTING_DOWN = "the router is shutting down"


class Admission:
    """A request is live from its admission to the end of its call, whatever becomes of it."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._live: set[str] = set()
        self.closed = False  # no request is admitted any more
        self._none_live = asyncio.Event()
        self._none_live.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @contextmanager
    def admitted(self, request_id: str) -> Iterator[None]:
        """
        Raises:
            NodeUnavailable: the router is shutting down.
            InvalidRequest: a live request has this id.
            Overloaded: as many requests as allowed are live. At once, nothing queues here.
        """
        if self.closed:
            raise NodeUnavailable(SHUTTING_DOWN)
        if request_id in self._live:
            raise InvalidRequest(f"request_id {request_id!r} is that of a live request")
        if len(self._live) >= self._max_requests:
            raise Overloaded(f"{len(self._live)} requests are live, as many as this router takes")
        self._live.add(request_id)
        self._none_live.clear()
        try:
            yield
        finally:
            self._live.remove(request_id)
            if not self._live:
                self._none_live.set()

    def close(self) -> None:
        """Refuses every request from now on."""
        self.closed = True

    async def wait_until_none_live(self) -> None:
        await self._none_live.wait()
