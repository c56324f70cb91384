"""Prompts whose prefix is being read from another node. They hold nothing, the fetch does."""

from collections.abc import Iterator

from engine.batch.request import Request
from node.sharing.fetches import PrefixFetches


class PrefixFetchQueue:
    """The queue for fetches. Engine thread only."""

    name = "fetching"

    def __init__(self, fetches: PrefixFetches) -> None:
        self._fetches = fetches
        self._waiting: dict[int, Request] = {}  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        """Return whether the request waits for a fetch in progress."""
        return self._fetches.waits(request.key)

    def put(self, request: Request) -> None:
        self._waiting[request.key] = request

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def ready(self, now: float) -> Iterator[tuple[Request, None]]:
        """Yield and remove the requests whose fetch has ended, successful or not."""
        for key in self._fetches.take_over():
            request = self._waiting.pop(key, None)
            if request is not None:
                yield request, None
