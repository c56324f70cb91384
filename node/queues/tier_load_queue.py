"""Requests whose prefix is loaded from an offload tier into the prefix cache.

They hold nothing, the copy holds the pages. When the copy ends, successful or not, the request
continues with what the tree has.
"""

import time
from collections.abc import Callable, Iterator

from engine.batch.request import Ints, Request
from engine.offload.cache_tiers import CacheTiers
from engine.offload.tier_matches import TierMatch


class TierLoadQueue:
    """The queue for loads from offload tiers. Engine thread only.

    Args:
        room: returns how many pages may be used now.
    """

    name = "offload_load"

    def __init__(self, tiers: CacheTiers, room: Callable[[], int]) -> None:
        self._tiers = tiers
        self._room = room
        self._waiting: dict[int, Request] = {}  # by key
        self._ways: dict[int, TierMatch] = {}  # by key, of requests that will be put next
        self._over: list[int] = []  # keys, to be yielded

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        """Return whether a sufficient part of its prefix is in an offload tier."""
        way = self._tiers.way(_wanted(request), request.namespace)
        if way is not None:
            self._ways[request.key] = way
        return way is not None

    def put(self, request: Request) -> None:
        """Add a request, right after `needed_by` has returned True."""
        key = request.key
        self._waiting[key] = request

        def over() -> None:
            self._over.append(key)

        if self._tiers.bring(self._ways.pop(key), self._room(), over):
            request.bringing.append(time.monotonic())
        else:
            over()

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def ready(self, now: float) -> Iterator[tuple[Request, None]]:
        """Yield and remove the requests whose load has ended."""
        self._tiers.poll()
        over, self._over = self._over, []
        for key in over:
            request = self._waiting.pop(key, None)
            if request is not None:
                request.note_brought(time.monotonic())
                yield request, None


def _wanted(request: Request) -> Ints:
    """Return the tokens whose KV may come from a cache. The last one must be computed."""
    return request.token_ids[: 0 if request.computed_whole else -1]
