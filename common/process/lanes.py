"""One stream's part of the socket to the engine process: whoever sends more than is read is slowed.

A peer's messages go on to the engine process one by one. Where that does not read as fast as a peer
sends, no more is taken of that peer's stream, and gRPC's flow control stops the peer itself; others
go on. Knows no gRPC and no messages.
"""

import asyncio
from typing import Any

import msgspec

from common.process.ipc import Backlogged, FrameConnection

MAX_WAITING_BYTES = 1 << 20  # of one stream, before it has to wait
# Of all streams together, before each has to: half of what ends a node.
MAX_BACKLOG_BYTES = 64 << 20
STUCK_S = 30.0  # an engine process that takes nothing for so long is at fault


class Lane:
    """Event loop only.

    Args:
        connection: shared by all streams.
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
        self._num_bytes = 0  # sent since none of this stream's waited
        self._end = 0  # of the last of them, in the count of the connection

    def send(self, message: msgspec.Struct) -> None:
        """Sends, whatever waits already. Raises as FrameConnection.send."""
        connection = self._connection
        if self._taken >= self._end:
            self._num_bytes = 0
        begin = connection.num_bytes_sent
        connection.send(message)
        self._end = connection.num_bytes_sent
        self._num_bytes += self._end - begin

    async def room(self) -> None:
        """Waits until this stream may send more: before it is read any further.

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
