"""Requests of another decode node that migrate to this one, while their KV so far is copied.

Requests of one node that are copied at the same time migrate as a group: all stop after the same
step there and start with the same step here. If they came one by one, each would arrive during a
step started for the one before it, and would pause until that step ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.batch.request import Request
from node.messages import MigrateFrom


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    request: Request
    awaited: set[int]  # keys of requests that were being copied when its own copy ended


class MigrationGroups:
    """Migration groups.

    Its length counts copied requests that wait for others. Engine thread only.
    """

    def __init__(self) -> None:
        self._sources: dict[int, MigrateFrom] = {}  # by key
        self._copied: dict[int, _Copied] = {}  # by key

    def __len__(self) -> int:
        return len(self._copied)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._sources

    def put(self, request: Request, source: MigrateFrom) -> None:
        """Register a request whose copy begins."""
        self._sources[request.key] = source

    def copied(self, request: Request) -> None:
        """Note that the copy of a request has ended, successfully or not."""
        address = self._sources[request.key].address
        awaited = {key for key, source in self._sources.items() if source.address == address}
        self._copied[request.key] = _Copied(request, awaited - self._copied.keys())
        self._await_no_more(request.key)

    def remove(self, request: Request) -> bool:
        """Remove a request.

        Returns whether its copy had ended. A request still being copied gives False.
        """
        self._sources.pop(request.key, None)
        self._await_no_more(request.key)
        return self._copied.pop(request.key, None) is not None

    def take(self) -> Iterator[tuple[Request, MigrateFrom]]:
        """Yield and remove the requests that migrate now."""
        for key, copied in tuple(self._copied.items()):
            if not copied.awaited:
                del self._copied[key]
                yield copied.request, self._sources.pop(key)

    def _await_no_more(self, key: int) -> None:
        for copied in self._copied.values():
            copied.awaited.discard(key)
