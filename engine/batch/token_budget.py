"""Tokens of the requests that a node keeps in memory before it can compute them. Bounded."""

from common.errors import Overloaded


class HeldTokens:
    """Engine thread only.

    Args:
        most: of all requests together; a single one may have more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: dict[int, int] = {}
        self._num_tokens = 0

    def take(self, key: int, num_tokens: int, *, times: int = 1) -> None:
        """Raises Overloaded where there is no room for them in `times` as much as there may be."""
        most = self._most * times
        if self._num_tokens and self._num_tokens + num_tokens > most:
            raise Overloaded(f"{self._num_tokens} tokens wait here already, of {most}")
        self._by_key[key] = num_tokens
        self._num_tokens += num_tokens

    def drop(self, key: int) -> None:
        """Nothing happens if none are held for it."""
        self._num_tokens -= self._by_key.pop(key, 0)
