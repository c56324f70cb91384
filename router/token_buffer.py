"""What a decode node said about one request and its client has not been told yet.

Filled by the node's stream, taken by the client's writer: all that waits goes into one message,
so a slow client makes fewer, larger messages and never a longer queue.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from common.errors import NodeUnavailable, ServingError
from common.requests.logprobs import TokenLogprobs
from common.requests.prediction import NOTHING, Predicted

T = TypeVar("T")


class End(msgspec.Struct, frozen=True):
    """How a request ended at its node."""

    finish_reason: str  # "stop" | "length"


class TokenBuffer:
    """One request's tokens between its node's stream and its client's writer.

    Bounded by the request's own max_tokens: a node that sends more breaks the protocol.
    """

    def __init__(self, max_tokens: int, *, wants_logprobs: bool = False) -> None:
        """
        Args:
            wants_logprobs: each token comes with them.
        """
        self.cached_tokens: int | None = None  # of the prompt, in the node's first report
        # Of all tokens but the first, as the node said with the first token it generated.
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.predicted = NOTHING  # of what is expected of it, since it was taken
        self._wants_logprobs = wants_logprobs
        self._logprobs: list[TokenLogprobs] = []  # of tokens that are not taken, or about to come
        self._room = max_tokens
        self._tokens: list[int] = []
        self._end: End | ServingError | None = None
        # Of the writer, while it waits: what it takes news with, and what it waits for.
        self._writer: tuple[Callable[[list[int], End | None], Any], asyncio.Future[Any]] | None
        self._writer = None
        self._news: asyncio.Future[None] | None = None

    def append(self, token: int) -> bool:
        """Returns False, and keeps nothing, when the node has sent all it was asked for, or has not
        sent what is to come with it."""
        if not self._room or (self._wants_logprobs and len(self._logprobs) <= len(self._tokens)):
            return False
        self._room -= 1
        self._tokens.append(token)
        return True

    def note_cached_tokens(self, cached_tokens: int) -> None:
        """Keep the first report: a node that retries finds the KV that its first try computed."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def tell_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of the tokens that are `append`ed next."""
        if self._wants_logprobs:
            self._logprobs += logprobs[: self._room]

    def take_logprobs(self, num_tokens: int) -> Sequence[TokenLogprobs]:
        """Of so many tokens, which have just been taken; nothing where none are wanted."""
        taken, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        return taken

    def take_predicted(self) -> Predicted:
        taken, self.predicted = self.predicted, NOTHING
        return taken

    def end(self, end: End | ServingError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end

    def tell(self) -> None:
        """Gives a writer that waits what has been appended, and the end: after every step."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if self._writer is None:
            return
        take, taken = self._writer
        if taken.done():
            return  # it is about to wake
        try:
            result = self._next(take)
        except Exception as error:  # noqa: BLE001  raised again in the writer
            taken.set_exception(error)
        else:
            if result is not None:
                taken.set_result(result)

    @property
    def has_begun(self) -> bool:
        """Whether there are tokens that nobody has taken."""
        return bool(self._tokens)

    def error(self) -> ServingError:
        """Of one that has ended without a token."""
        end = self._end
        return end if isinstance(end, ServingError) else NodeUnavailable("it ended without a token")

    async def news(self) -> None:
        """Returns once there are tokens, or an end; takes nothing. As `taken`."""
        if not self._tokens and self._end is None:
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def taken(self, take: Callable[[list[int], End | None], T | None]) -> T:
        """Calls `take` with every token that waits, and the end if it has come, at once and
        whenever there is news, until it gives something other than None: returns that. For one
        writer; with the end `take` must give something, and this must not be called again.

        Its writer sleeps through tokens that `take` does away with: to wake it for each would
        cost more than they do.

        Raises:
            ServingError: the request failed, and all its tokens have been taken.
        """
        result = self._next(take)
        if result is not None:
            return result
        taken: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._writer = take, taken
        try:
            return await taken
        finally:
            self._writer = None

    def _next(self, take: Callable[[list[int], End | None], T | None]) -> T | None:
        end = self._end
        if self._tokens or isinstance(end, End):
            tokens, self._tokens = self._tokens, []
            result = take(tokens, end if isinstance(end, End) else None)
            if result is not None:
                return result
        if isinstance(end, ServingError):
            raise end
        return None
