"""A packet socket between a rank and the relay or rank host, on the event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, Self

from engine.ranks.messages import MAX_PACKET_BYTES


class PacketSocket:
    """One end of a socket pair. One task may receive, and others may send.

    Args:
        packets: the socket. Owned by this object.
    """

    def __init__(self, packets: socket.socket) -> None:
        packets.setblocking(False)
        self._socket = packets
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def receive(self) -> tuple[bytes, Sequence[int]]:
        """Return a packet and its file descriptors, owned by the caller. b"": end of file."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
                return packet, files
            except BlockingIOError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
            except ConnectionResetError:  # the peer has ended before it read a packet
                continue  # its own packets can still be received, and then its end of file

    async def send(self, packet: bytes, files: Sequence[int] = ()) -> None:
        """Send a packet once there is room. No effect if the peer has closed, see `receive`."""
        async with self._sending:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    try:
                        socket.send_fds(self._socket, [packet], files)
                        return
                    except BlockingIOError:
                        await self._until(self._loop.add_writer, self._loop.remove_writer)

    def end(self) -> None:
        """Send end of file. Packets of the peer can still be received."""
        with contextlib.suppress(OSError):  # the peer has closed
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _until(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        ready = asyncio.Event()
        add(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self._socket)
