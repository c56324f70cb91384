"""The HTTP listener: it accepts connections, enforces their deadlines and drains them."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable

from api.http.acceptor import HttpAcceptor
from api.http.handshake import Handshake
from api.http.service import HttpService
from api.http.shared import HttpContext
from common.errors import ConfigError
from common.rpc import join_address

_BACKLOG = 1024
_MAX_UNSENT_BYTES = 64 << 10  # in the kernel, beyond the client's receive window
# A host that disappears silently is detected after all of these together.
_SILENT_S, _PROBE_S, _PROBES = 15, 5, 3


class HttpServer:
    """The HTTP server of one event loop. Call `start` once, and `stop` at the end."""

    def __init__(
        self,
        shared: HttpContext,
        service: HttpService,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """
        Args:
            service: serves the requests of its connections.
            tls_context: returns the context of each TLS handshake. None: without TLS.
        """
        self._shared = shared
        self._service = service
        self._tls_context = tls_context
        self._listener: asyncio.Server | None = None
        self._next_tick: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen, and return the port, which the system chooses for port 0.

        Args:
            shares_port: whether other processes share the port, as in common.rpc.bind.

        Raises:
            ConfigError: the address is not available.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._protocol, host, port, backlog=_BACKLOG, reuse_port=shares_port or None
            )
        except OSError as error:
            address = join_address(host, port)
            # uvloop adds the address to the message, which has it already.
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"--http-port: cannot listen on {address}: {reason}") from error
        for listener in self._listener.sockets:
            _set_options(listener.fileno())
        self._tick()
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Stop accepting connections."""
        if self._listener is not None:
            self._listener.close()

    def drain(self) -> None:
        """Close each connection after its current response, and idle connections immediately."""
        self._shared.draining = True
        for member in list(self._shared.members):
            member.drain()

    async def wait_until_all_gone(self, longest_s: float) -> None:
        """Wait until all connections have ended, for at most `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._shared.all_gone.wait()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections, give running responses `grace_s` and end the rest."""
        self.stop_listening()
        self.drain()
        await self.wait_until_all_gone(grace_s)
        for member in list(self._shared.members):
            member.abort()
        if self._next_tick is not None:
            self._next_tick.cancel()

    def _protocol(self) -> HttpAcceptor | Handshake:
        if self._tls_context is None:
            return self._service.door()
        return Handshake(self._shared, self._service.door, self._tls_context)

    def _tick(self) -> None:
        self._shared.tick()
        loop = asyncio.get_running_loop()
        self._next_tick = loop.call_later(self._shared.limits.tick_s, self._tick)


def _set_options(listener: int) -> None:
    """Set socket options of a listener, which accepted connections inherit."""
    with socket.socket(fileno=os.dup(listener)) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _SILENT_S),
            (socket.TCP_KEEPINTVL, _PROBE_S),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES),
        ):
            shared.setsockopt(socket.IPPROTO_TCP, option, value)
