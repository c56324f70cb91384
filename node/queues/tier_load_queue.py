"""Requests whose prefix is brought back from a tier below the prefix cache: they hold nothing, the
copy does. When it is over the tree has it, or not: the request goes on as if there had been none.
"""

import time
from collections.abc import Callable, Iterator

from engine.batch.request import Ints, Request
from engine.offload.tiers import Tiers
from engine.offload.ways import Way


class TierLine:
    """Engine thread only.

    Args:
        room: how many pages may be taken now.
    """

    name = "bringing"

    def __init__(self, tiers: Tiers, room: Callable[[], int]) -> None:
        self._tiers = tiers
        self._room = room
        self._waiting: dict[int, Request] = {}  # by key
        self._ways: dict[int, Way] = {}  # of those that are going to be put, by key
        self._over: list[int] = []  # keys, to be taken

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        """Whether a good part of it is below."""
        way = self._tiers.way(_wanted(request), request.namespace)
        if way is not None:
            self._ways[request.key] = way
        return way is not None

    def put(self, request: Request) -> None:
        """Right after it has been found to need it."""
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

    def take(self, now: float) -> Iterator[tuple[Request, None]]:
        """Those whose copy is over. Takes them."""
        self._tiers.poll()
        over, self._over = self._over, []
        for key in over:
            request = self._waiting.pop(key, None)
            if request is not None:
                request.note_brought(time.monotonic())
                yield request, None


def _wanted(request: Request) -> Ints:
    """Of its tokens, those whose KV may come from a cache: the last one is computed."""
    return request.token_ids[: 0 if request.computed_whole else -1]
