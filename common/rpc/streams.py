"""Both directions of one gRPC stream: a bounded way out, a reading task, one end for both.

Alike for router streams and pair streams, on the server's and on the client's side. Nobody waits
for a peer that does not read: it is cut off. One that says more than can be taken waits itself.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from common.errors import Overloaded, ServingError

M = TypeVar("M", bound=Message)
R = TypeVar("R")

MAX_UNSENT = 2048  # messages; a router gets one per step, so this is 10 s of fast steps or more
MAX_UNSENT_BYTES = 32 << 20
_LAST_WRITE_S = 1.0  # for a write under way at the end


class Outgoing(Generic[M]):
    """Messages on their way to one peer. Event loop only; no call blocks but `converse`."""

    def __init__(
        self,
        *,
        last_words: Callable[[ServingError], M] | None = None,
        max_messages: int = MAX_UNSENT,
        max_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """
        Args:
            last_words: what tells the peer of an error that ends the stream. None: it is told in no
                message.
        """
        self._last_words = last_words
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._unsent: deque[tuple[M, int]] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._end: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()
        self._last: ServingError | None = None  # ends the stream once all is written
        self._over = False
        self.cut_off = False  # the peer did not read

    def put(self, message: M) -> None:
        """Queues a message. One too many ends the stream; after an end nothing is queued."""
        if self._end.done() or self._last:
            return
        num_bytes = message.ByteSize()
        if len(self._unsent) >= self._max_messages or self._num_bytes + num_bytes > self._max_bytes:
            self.cut_off = True
            self.end(Overloaded(f"{len(self._unsent)} messages wait for a peer that does not read"))
            return
        self._unsent.append((message, num_bytes))
        self._num_bytes += num_bytes
        self._changed.set()

    def end(self, error: ServingError) -> None:
        """Ends the stream with this error, unsent messages or not. The first call counts."""
        if not self._end.done():
            self._end.set_result(error)
            self._unsent.clear()

    def close(self, error: ServingError) -> None:
        """Ends the stream with this error as soon as everything put so far has been written."""
        self._last = self._last or error
        self._changed.set()

    async def _next(self) -> M | None:
        """None once the conversation is over."""
        while not self._unsent:
            if self._over:
                return None
            if self._last:
                self.end(self._last)
            self._changed.clear()
            await self._changed.wait()
        message, num_bytes = self._unsent.popleft()
        self._num_bytes -= num_bytes
        return message

    async def converse(
        self,
        write: Callable[[M], Awaitable[None]],
        incoming: AsyncIterator[R],
        take: Callable[[R], Awaitable[None]],
    ) -> None:
        """Writes what is put and gives what comes to `take`, until the stream is over. Nothing more
        is read of the stream while `take` waits.

        Returns when `incoming` ends: the peer has closed its direction.
        Raises:
            What `end` was given, what `take` raised, or what the stream did, whichever was first.
            The peer has been told of a ServingError then, if it reads.
        """

        async def writing() -> None:
            while (message := await self._next()) is not None:
                await write(message)

        async def reading() -> None:
            async for message in incoming:
                await take(message)

        reader, writer = asyncio.ensure_future(reading()), asyncio.ensure_future(writing())
        tasks: tuple[asyncio.Future[Any], ...] = (reader, writer)
        unsaid: list[M] = []
        try:
            await asyncio.wait((*tasks, self._end), return_when="FIRST_COMPLETED")
            # An end of our own says more than what the stream then did.
            if self._end.done():
                raise self._end.result()
            for task in tasks:
                if task.done():
                    task.result()
        except ServingError as error:
            unsaid = [self._last_words(error)] if self._last_words else []
            raise
        finally:
            self._over = True
            self._unsent = deque((message, message.ByteSize()) for message in unsaid)
            self._changed.set()
            reader.cancel()
            try:
                # A stream cannot be given its status while a write to it is under way.
                await asyncio.wait({writer}, timeout=_LAST_WRITE_S)
            finally:  # also of a conversation that is cancelled once more meanwhile
                writer.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
