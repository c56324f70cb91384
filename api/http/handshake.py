"""A client's connection until its TLS handshake is complete. Then a HttpAcceptor takes over.

It counts as a connection from the start and has a deadline, so a silent client does not hold its
place for long.
"""

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from api.http.acceptor import HttpAcceptor
from api.http.connection_limit import ConnectionSlot
from api.http.shared import HttpContext, peer_of


class Handshake(asyncio.Protocol):
    """The protocol that the server makes for each client if it serves TLS."""

    def __init__(
        self,
        shared: HttpContext,
        door: Callable[[], HttpAcceptor],
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """
        Args:
            door: makes the HttpAcceptor that takes over the connection.
            context: returns the TLS context. Called once per handshake.
        """
        self.deadline = math.inf  # the event loop has its own deadline for handshakes
        self._shared = shared
        self._door = door
        self._context = context
        self._peer = ""
        self._place: ConnectionSlot | None = None
        self._shaking: asyncio.Task[None]

    def expire(self) -> None:
        self.abort()

    def drain(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._shaking.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Move the socket out of the transport before anything is read.

        The event loop reports whether a handshake failed only for a socket that its caller passes
        in.
        """
        peer = peer_of(transport)
        self._place = self._shared.room.enter(peer.host, self.abort)
        if self._place is not None:
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
            self._peer = peer.address
            self._shared.join(self)
            self._shaking = asyncio.ensure_future(self._shake(socket.socket(fileno=descriptor)))
        cast(asyncio.Transport, transport).abort()

    async def _shake(self, client: socket.socket) -> None:
        limits = self._shared.limits
        try:
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Standing(self._stands),
                client,
                ssl=self._context(),
                ssl_handshake_timeout=limits.handshake_s,
                ssl_shutdown_timeout=limits.linger_s,
            )
        except OSError as error:  # TLS error, reset or timeout
            because = str(error) or "the client disconnected"
            self._shared.log.info(
                "TLS handshake with a client failed", peer=self._peer, reason=because
            )
        finally:
            if self in self._shared.members:  # `_stands` was not called
                self._leave()
                client.close()

    def _stands(self, transport: asyncio.Transport) -> None:
        self._leave()
        door = self._door()
        transport.set_protocol(door)
        door.connection_made(transport)

    def _leave(self) -> None:
        self._shared.leave(self)
        if self._place is not None:
            self._place.leave()


class _Standing(asyncio.Protocol):
    """The protocol that the event loop holds until the handshake is complete."""

    def __init__(self, stands: Callable[[asyncio.Transport], None]) -> None:
        self._stands = stands

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stands(cast(asyncio.Transport, transport))
