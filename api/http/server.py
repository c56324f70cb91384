"""Listens, looks after the connections' deadlines, and ends them in order."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable

from api.http.acceptor import Door
from api.http.handshake import Handshake
from api.http.service import Service
from api.http.shared import Shared
from common.errors import ConfigError
from common.rpc import join_address

_BACKLOG = 1024
_MAX_UNSENT_BYTES = 64 << 10  # in the kernel, beyond what a client has room for
# A host that is gone without a word is missed after these together.
_SILENT_S, _PROBE_S, _PROBES = 15, 5, 3


class HttpServer:
    """For one event loop. `start` once, `stop` at the end."""

    def __init__(
        self,
        shared: Shared,
        service: Service,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """
        Args:
            service: answers what comes through its doors.
            tls_context: asked before each TLS handshake; None: without TLS.
        """
        self._shared = shared
        self._service = service
        self._tls_context = tls_context
        self._listener: asyncio.Server | None = None
        self._next_tick: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listens; returns the port, which port 0 leaves to the system.

        Args:
            shares_port: with other processes, as for common.rpc.bind.
        Raises:
            ConfigError: it cannot listen there.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._protocol, host, port, backlog=_BACKLOG, reuse_port=shares_port or None
            )
        except OSError as error:
            address = join_address(host, port)
            # uvloop puts the address into the sentence, which has it already.
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"--http-port: cannot listen on {address}: {reason}") from error
        for listener in self._listener.sockets:
            _set_options(listener.fileno())
        self._tick()
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Takes no new connection."""
        if self._listener is not None:
            self._listener.close()

    def drain(self) -> None:
        """From now on every answer ends its connection; those that wait for a request end now."""
        self._shared.draining = True
        for member in list(self._shared.members):
            member.drain()

    async def wait_until_all_gone(self, longest_s: float) -> None:
        """All connections; or returns after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._shared.all_gone.wait()

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, gives answers under way `grace_s` and ends the rest."""
        self.stop_listening()
        self.drain()
        await self.wait_until_all_gone(grace_s)
        for member in list(self._shared.members):
            member.abort()
        if self._next_tick is not None:
            self._next_tick.cancel()

    def _protocol(self) -> Door | Handshake:
        if self._tls_context is None:
            return self._service.door()
        return Handshake(self._shared, self._service.door, self._tls_context)

    def _tick(self) -> None:
        self._shared.tick()
        loop = asyncio.get_running_loop()
        self._next_tick = loop.call_later(self._shared.limits.tick_s, self._tick)


def _set_options(listener: int) -> None:
    """Every connection that is accepted has the options of its listener."""
    with socket.socket(fileno=os.dup(listener)) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _SILENT_S),
            (socket.TCP_KEEPINTVL, _PROBE_S),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES),
        ):
            shared.setsockopt(socket.IPPROTO_TCP, option, value)
