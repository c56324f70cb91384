"""Requests that are to be placed once the pause of this node is over. They hold nothing."""

from collections.abc import Iterator

from decode_node.unpaired import Waiter
from engine.batch.request import Request


class HeldBack:
    """In order of arrival. A waiter's `until` is by when it must have been placed."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}  # by request key

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters.values()))

    def append(self, waiter: Waiter) -> None:
        self._waiters[waiter.request.key] = waiter

    def remove(self, request: Request) -> bool:
        """Whether it was here."""
        return self._waiters.pop(request.key, None) is not None
