"""A bounded budget of tokens for requests that are held in memory before they can be computed."""

from common.errors import Overloaded


class TokenBudget:
    """A token budget. Engine thread only.

    Args:
        most: limit for all requests together; a single request may exceed it.
        unit: of the limit, for errors.
    """

    def __init__(self, most: int, unit: str = "tokens") -> None:
        self._most = most
        self._unit = unit
        self._by_key: dict[int, int] = {}
        self._num_tokens = 0

    def take(self, key: int, num_tokens: int, *, times: int = 1) -> None:
        """Count `num_tokens` for the request. Raise Overloaded if they exceed `times` the limit."""
        most = self._most * times
        if self._num_tokens and self._num_tokens + num_tokens > most:
            raise Overloaded(f"the queue is full ({self._num_tokens} of {most} {self._unit})")
        self._by_key[key] = num_tokens
        self._num_tokens += num_tokens

    def drop(self, key: int) -> None:
        """Release the tokens of the request, if any."""
        self._num_tokens -= self._by_key.pop(key, 0)
