"""Which requests are live: names that are taken, how many more fit, when none is left."""

import asyncio
import random

from common.errors import InvalidRequest, NodeUnavailable, Overloaded

SHUTTING_DOWN = "the router is shutting down"


class Admission:
    """A request is live from its admission to the end of its call, whatever becomes of it."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._live: set[str] = set()
        self.closed = False  # no request is admitted any more
        self._none_live = asyncio.Event()
        self._none_live.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def admitted(self, request_id: str) -> "Admitted":
        """The request is live inside of what this returns, which must be entered at once.

        Raises:
            NodeUnavailable: the router is shutting down.
            InvalidRequest: a live request has this id.
            Overloaded: as many requests as allowed are live. At once, nothing queues here.
        """
        if self.closed:
            raise NodeUnavailable(SHUTTING_DOWN)
        if request_id in self._live:
            raise InvalidRequest(f"request_id {request_id!r} is that of a live request")
        if len(self._live) >= self.max_requests:
            raise Overloaded(f"{len(self._live)} requests are live, as many as this router takes")
        return Admitted(self._live, self._none_live, request_id)

    def close(self) -> None:
        """Refuses every request from now on."""
        self.closed = True

    async def wait_until_none_live(self) -> None:
        await self._none_live.wait()


class Admitted:
    """One request among the live ones, from entering to leaving."""

    __slots__ = ("_live", "_none_live", "_request_id")

    def __init__(self, live: set[str], none_live: asyncio.Event, request_id: str) -> None:
        self._live = live
        self._none_live = none_live
        self._request_id = request_id

    def __enter__(self) -> None:
        self._live.add(self._request_id)
        self._none_live.clear()

    def __exit__(self, *_: object) -> None:
        self._live.remove(self._request_id)
        if not self._live:
            self._none_live.set()


def new_request_id() -> str:
    """Of 128 random bits, so that no two routers make the same. Nobody may rely on its being hard
    to guess."""
    return f"{random.getrandbits(128):032x}"
