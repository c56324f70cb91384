"""Output of a decode node for one request that is not written to its client yet.

The node's stream fills the buffer and the client's writer empties it. All waiting tokens go into
one message, so a slow client gets fewer, larger messages and never a longer queue.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from common.errors import NodeUnavailable, ServingError
from common.requests.logprobs import NOTHING, PredictionUsage, TokenLogprobs

T = TypeVar("T")


class StreamEnd(msgspec.Struct, frozen=True):
    """End of a request at its node."""

    finish_reason: str  # "stop" | "length"


class NodeOutput(msgspec.Struct, frozen=True):
    """Output of a decode node for one request.

    Attributes:
        end: None: the request runs.
        cached_tokens: prompt tokens that were cached. None: not reported yet.
        logprobs: of the tokens, if requested.
        prompt_logprobs: of the prompt's tokens except the first one, if requested.
        predicted: counts of predicted tokens.
    """

    token_ids: Sequence[int]
    end: StreamEnd | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    predicted: PredictionUsage = NOTHING


class TokenBuffer:
    """Tokens of one request between its node's stream and its client's writer.

    Bounded by the request's max_tokens: a node that sends more violates the protocol.
    """

    def __init__(self, max_tokens: int, *, wants_logprobs: bool = False) -> None:
        """Create an empty buffer.

        Args:
            max_tokens: tokens that the node may send.
            wants_logprobs: each token comes with log-probabilities.
        """
        self.cached_tokens: int | None = None  # cached prompt tokens, from the node's first report
        # Of all prompt tokens except the first, as sent with the first generated token.
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.predicted = NOTHING  # predicted tokens since the last output
        self._wants_logprobs = wants_logprobs
        self._logprobs: list[TokenLogprobs] = []  # of tokens not taken yet or about to come
        self._room = max_tokens
        self._tokens: list[int] = []
        self._end: StreamEnd | ServingError | None = None
        # Set while the writer waits: its `take` callback and the future it waits for.
        self._writer: tuple[Callable[[NodeOutput], Any], asyncio.Future[Any]] | None = None
        self._news: asyncio.Future[None] | None = None

    def append(self, token: int) -> bool:
        """Append a token. Returns False, and keeps nothing, if the node violates the protocol.

        That is if it has sent max_tokens already, or a token without its log-probabilities.
        """
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
        """Add the log-probabilities of the tokens that are appended next."""
        if self._wants_logprobs:
            self._logprobs += logprobs[: self._room]

    def end(self, end: StreamEnd | ServingError) -> None:
        """Record the end. Only the first one counts."""
        if self._end is None:
            self._end = end

    def tell(self) -> None:
        """Give a waiting writer the new tokens and the end. Called after every step."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if self._writer is None:
            return
        take, taken = self._writer
        if taken.done():
            return  # it is about to wake up
        try:
            result = self._next(take)
        except Exception as error:  # noqa: BLE001  raised again in the writer
            taken.set_exception(error)
        else:
            if result is not None:
                taken.set_result(result)

    @property
    def has_begun(self) -> bool:
        """True if there are tokens that are not taken."""
        return bool(self._tokens)

    def error(self) -> ServingError:
        """Return the error of a request that has ended without a token."""
        end = self._end
        return end if isinstance(end, ServingError) else NodeUnavailable("it ended without a token")

    async def news(self) -> None:
        """Wait until there are tokens, or an end, and leave them in the buffer."""
        if not self._tokens and self._end is None:
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def taken(self, take: Callable[[NodeOutput], T | None]) -> T:
        """Call `take` with waiting output until it returns a result.

        `take` is called at once and at each change. It returns None to wait for more, but must
        return a result with the end. After that, this must not be called again. Only one writer may
        use this.

        The writer is not woken for tokens that `take` only consumes: that would cost more than they
        do.

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

    def _next(self, take: Callable[[NodeOutput], T | None]) -> T | None:
        end, tokens = self._end, self._tokens
        if tokens or isinstance(end, StreamEnd):
            self._tokens = []
            logprobs: Sequence[TokenLogprobs] = ()
            if self._wants_logprobs:
                logprobs = self._logprobs[: len(tokens)]
                self._logprobs = self._logprobs[len(tokens) :]
            predicted, self.predicted = self.predicted, NOTHING
            stream_end = end if isinstance(end, StreamEnd) else None
            result = take(
                NodeOutput(
                    tokens,
                    stream_end,
                    self.cached_tokens,
                    logprobs,
                    self.prompt_logprobs,
                    predicted,
                )
            )
            if result is not None:
                return result
        if isinstance(end, ServingError):
            raise end
        return None
