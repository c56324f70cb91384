"""Requests that run at another decode node and are to run here, while what they have so far is
copied.

Those of one node that are copied at the same time go together: they stop with the same step there,
and begin with the same one here. One after the other, each would come in the midst of a step that
the one before it has begun, and stand still to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.batch.request import Request
from node.messages import MoveFrom


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    request: Request
    awaited: set[int]  # keys of those that were being copied when its own copy ended


class Convoys:
    """Engine thread only. Its length: of those that are copied, and wait for others."""

    def __init__(self) -> None:
        self._sources: dict[int, MoveFrom] = {}  # by key
        self._copied: dict[int, _Copied] = {}  # by key

    def __len__(self) -> int:
        return len(self._copied)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._sources

    def put(self, request: Request, source: MoveFrom) -> None:
        """A copy of it begins."""
        self._sources[request.key] = source

    def copied(self, request: Request) -> None:
        """Its copy has ended, in whatever way."""
        address = self._sources[request.key].address
        awaited = {key for key, source in self._sources.items() if source.address == address}
        self._copied[request.key] = _Copied(request, awaited - self._copied.keys())
        self._await_no_more(request.key)

    def remove(self, request: Request) -> bool:
        """Whether it was copied; it may be here in any case."""
        self._sources.pop(request.key, None)
        self._await_no_more(request.key)
        return self._copied.pop(request.key, None) is not None

    def take(self) -> Iterator[tuple[Request, MoveFrom]]:
        """Those that go now. Takes them."""
        for key, copied in tuple(self._copied.items()):
            if not copied.awaited:
                del self._copied[key]
                yield copied.request, self._sources.pop(key)

    def _await_no_more(self, key: int) -> None:
        for copied in self._copied.values():
            copied.awaited.discard(key)
