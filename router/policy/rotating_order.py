"""Whose turn it is, among nodes between which nothing else decides."""

from typing import TypeVar

T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self._turn = 0

    def rotated(self, items: list[T]) -> list[T]:
        """The items from another one on at each call."""
        if len(items) < 2:
            return items
        self._turn += 1
        first = self._turn % len(items)
        return items[first:] + items[:first]
