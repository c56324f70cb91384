"""What a decode node said about one request and its client has not been told yet.

Filled by the node's stream, drained by the client's writer: all that waits goes into one message,
so a slow client makes fewer, larger messages and never a longer queue.
"""

import asyncio

import msgspec

from common.errors import ServingError


class End(msgspec.Struct, frozen=True):
    """How a request ended at its node."""

    finish_reason: str  # "stop" | "length"


class TokenBuffer:
    """One request's tokens between its node's stream and its client's writer.

    Bounded by the request's own max_tokens: a node that sends more breaks the protocol.
    """

    def __init__(self, max_tokens: int) -> None:
        self.cached_tokens = 0  # of the prompt, as the node said with the first token
        self._room = max_tokens
        self._tokens: list[int] = []
        self._end: End | ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the writer, while there is no news

    def append(self, token: int) -> bool:
        """Returns False, and keeps nothing, when the node has sent all it was asked for."""
        if not self._room:
            return False
        self._room -= 1
        self._tokens.append(token)
        if self._waiter is not None:
            self._wake(self._waiter)
        return True

    def end(self, end: End | ServingError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end
            if self._waiter is not None:
                self._wake(self._waiter)

    async def drain(self) -> tuple[list[int], End | None]:
        """Waits for news, then takes every token that waits, and the end if it has come. For one
        writer; after the end it must not be called again.

        Raises:
            ServingError: the request failed, and all its tokens have been drained.
        """
        if not self._tokens and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._tokens = self._tokens, []
        if isinstance(self._end, ServingError):
            if tokens:
                return tokens, None
            raise self._end
        return tokens, self._end

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        self._waiter = None
        if not waiter.done():  # else the writer has been cancelled
            waiter.set_result(None)
