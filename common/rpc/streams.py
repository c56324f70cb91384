"""Both directions of one gRPC stream: a bounded send queue, a reading task, and one end for both.

Used for router streams and pair streams, on servers and clients. A peer that does not read is
disconnected instead of blocking others. A peer that sends too fast is slowed by backpressure.

The server sends the reason for the end of a bidirectional stream as the last message. The status
that follows has the same content but may be lost: if a client's write fails because the stream has
just ended, grpc.aio replaces the status by INTERNAL. So a writing client gets the reason from its
reader, which prefers the last message to the status.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from common.errors import Overloaded, ProtocolViolation, ServingError, cut
from protos import last_words_pb2

_OF_A_FAILED_WRITE = "Internal error from Core"  # message of grpc.aio
_STATUS_LOST = "the stream ended while a message was sent, and its status was lost"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamStatus(Exception):
    """The stream was ended by the server or by a connection failure."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(f"{code.name}: {sentence}")
        self.code = code
        self.sentence = sentence


# The last message of a server that ends a stream without an error.
ORDERLY_END = last_words_pb2.LastWords(code=grpc.StatusCode.OK.value[0])


def said(error: ServingError) -> last_words_pb2.LastWords:
    return last_words_pb2.LastWords(code=error.status.value[0], sentence=str(error))


async def heard(call: Any) -> AsyncIterator[Any]:
    """Yield the server's messages. A `last_words` message becomes a StreamStatus.

    Ends when the server ends the stream without an error.

    Raises:
        ProtocolViolation: the server has sent a malformed message.
        StreamStatus: any other end.
    """
    end: StreamStatus | None = None
    try:
        # `call.read` would read nothing after a failed write.
        async for message in call:
            if message is None:  # grpcio returns None for bytes that it cannot parse
                raise ProtocolViolation("the node sent bytes that are not a message")
            if message.HasField("last_words"):
                words = message.last_words
                end = StreamStatus(
                    _CODES.get(words.code, grpc.StatusCode.UNKNOWN), cut(words.sentence)
                )
            elif end is None:
                yield message
    except grpc.aio.AioRpcError as error:
        if end is None:
            raise _stream_status(error) from error
    if end is not None and end.code is not grpc.StatusCode.OK:
        raise end


def _stream_status(error: grpc.aio.AioRpcError) -> StreamStatus:
    sentence = error.details() or ""
    return StreamStatus(error.code(), _STATUS_LOST if sentence == _OF_A_FAILED_WRITE else sentence)


M = TypeVar("M", bound=Message)
R = TypeVar("R")
MAX_UNSENT = 2048  # messages; a router gets one per step, so this is at least 10 s of fast steps
MAX_UNSENT_BYTES = 32 << 20
_LAST_WRITE_S = 1.0  # seconds for a write in progress at the end


class OutgoingStream(Generic[M]):
    """Send queue for one peer. Event loop only. Only `converse` waits."""

    def __init__(
        self,
        *,
        last_words: Callable[[ServingError], M] | None = None,
        max_messages: int = MAX_UNSENT,
        max_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """
        Args:
            last_words: returns the message for an error that ends the stream. None: no message.
        """
        self._last_words = last_words
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._unsent: deque[tuple[M, int]] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._end: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()
        self._last: ServingError | None = None  # ends the stream after everything is written
        self._over = False
        self.cut_off = False  # ended because the peer did not read

    def put(self, message: M) -> None:
        """Queue a message. Exceeding a limit ends the stream. After an end, nothing is queued."""
        if self._end.done() or self._last:
            return
        num_bytes = message.ByteSize()
        if len(self._unsent) >= self._max_messages or self._num_bytes + num_bytes > self._max_bytes:
            self.cut_off = True
            self.end(Overloaded(f"the peer does not read: {len(self._unsent)} messages are queued"))
            return
        self._unsent.append((message, num_bytes))
        self._num_bytes += num_bytes
        self._changed.set()

    def end(self, error: ServingError) -> None:
        """End the stream with this error, and drop unsent messages. Only the first call counts."""
        if not self._end.done():
            self._end.set_result(error)
            self._unsent.clear()

    def close(self, error: ServingError) -> None:
        """End the stream with this error after all queued messages are written."""
        self._last = self._last or error
        self._changed.set()

    async def _next(self) -> M | None:
        """Return the next message, or None once the stream has ended."""
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
        """Write queued messages and pass incoming ones to `take`, until the stream ends.

        Nothing is read while `take` waits. Returns when the peer closes its direction.

        Raises:
            The first error from `end`, `take` or the stream. A ServingError is first sent to the
            peer, if the peer reads.
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
            # An explicit end is more specific than the stream's own error.
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
                # The status cannot be sent while a write is in progress.
                await asyncio.wait({writer}, timeout=_LAST_WRITE_S)
            finally:  # also if this task is cancelled again meanwhile
                writer.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
