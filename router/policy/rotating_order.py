"""Rotation among nodes that are otherwise equal."""

from typing import TypeVar

T = TypeVar("T")


class RotatingOrder:
    def __init__(self) -> None:
        self._turn = 0

    def rotated(self, items: list[T]) -> list[T]:
        """Return the items, rotated to another first one at each call."""
        if len(items) < 2:
            return items
        self._turn += 1
        first = self._turn % len(items)
        return items[first:] + items[:first]
