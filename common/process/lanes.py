"""Backpressure for streams that share the socket to the engine process.

Messages of peers are passed to the engine process one by one. If it does not read as fast as a peer
sends, that peer's stream is not read, and gRPC's flow control stops the peer. Other streams
continue.
"""

import asyncio
from typing import Any

import msgspec

from common.process.ipc import Backlogged, FrameConnection

MAX_WAITING_BYTES = 1 << 20  # limit of one stream
# Limit of all streams together: half of the limit that ends a node.
MAX_BACKLOG_BYTES = 64 << 20
STUCK_S = 30.0  # an engine process that reads nothing for so long is at fault


class CallLane:
    """The share of one stream. Event loop only.

    Args:
        connection: shared by all streams.
        max_waiting_bytes: limit of this stream.
        stuck_s: longest time without progress of the engine process.
    """

    def __init__(
        self,
        connection: FrameConnection[Any],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._connection = connection
        self._max_waiting_bytes = max_waiting_bytes
        self._stuck_s = stuck_s
        self._num_bytes = 0  # bytes sent since this stream had none waiting
        self._end = 0  # position of the last of them, in bytes sent on the connection

    def send(self, message: msgspec.Struct) -> None:
        """Send a message at once, regardless of limits. Raises as FrameConnection.send does."""
        connection = self._connection
        if self._taken >= self._end:
            self._num_bytes = 0
        begin = connection.num_bytes_sent
        connection.send(message)
        self._end = connection.num_bytes_sent
        self._num_bytes += self._end - begin

    async def room(self) -> None:
        """Wait until this stream may send more. Call it before the next read from the stream.

        Raises:
            Backlogged: the engine process reads nothing at all.
        """
        connection = self._connection
        while connection.is_behind and self._is_full:
            before = self._taken
            try:
                async with asyncio.timeout(self._stuck_s):
                    await connection.caught_up()
            except TimeoutError:
                if self._taken == before:
                    waiting = connection.backlog_bytes
                    raise Backlogged(
                        f"{waiting} bytes wait, and nothing was read for {self._stuck_s:g} s"
                    ) from None

    @property
    def _taken(self) -> int:
        """Bytes of the connection that no longer wait in this process."""
        return self._connection.num_bytes_sent - self._connection.backlog_bytes

    @property
    def _is_full(self) -> bool:
        mine = self._num_bytes if self._taken < self._end else 0
        backlog = self._connection.backlog_bytes
        return mine > self._max_waiting_bytes or backlog > MAX_BACKLOG_BYTES
