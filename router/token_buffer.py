"""What a decode node said about one request and its client has not been told yet.

Filled by the node's stream, drained by the client's writer: all that waits goes into one message,
so a slow client makes fewer, larger messages and never a longer queue.
"""

import asyncio
from dataclasses import dataclass

from common.errors import ServingError


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended at its node."""

    finish_reason: str  # "stop" | "length"
    cached_tokens: int


class TokenBuffer:
    """One request's tokens between its node's stream and its client's writer.

    Bounded by the request's own max_tokens: a node that sends more breaks the protocol.
    """

    def __init__(self, max_tokens: int) -> None:
        self._room = max_tokens
        self._tokens: list[int] = []
        self._end: End | ServingError | None = None
        self._news = asyncio.Event()

    def append(self, token: int) -> bool:
        """Returns False, and keeps nothing, when the node has sent all it was asked for."""
        if not self._room:
            return False
        self._room -= 1
        self._tokens.append(token)
        self._news.set()
        return True

    def end(self, end: End | ServingError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end
            self._news.set()

    async def drain(self) -> tuple[list[int], End | None]:
        """Waits for news, then takes every token that waits, and the end if it has come.

        Raises:
            ServingError: the request failed, and all its tokens have been drained.
        """
        await self._news.wait()
        tokens, self._tokens = self._tokens, []
        if isinstance(self._end, ServingError):
            if tokens:
                return tokens, None
            raise self._end
        if self._end is None:
            self._news.clear()
        return tokens, self._end
