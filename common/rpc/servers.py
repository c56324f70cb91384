"""gRPC servers and their ports."""

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from common import tls
from common.errors import ConfigError
from common.rpc.addresses import join_address
from common.rpc.options import MAX_MESSAGE_BYTES, SERVER_OPTIONS

log = logging.getLogger(__name__)


PORT, HEALTH_PORT = "--port", "--server.health-port"  # settings, for error messages


def make_server(
    more: Sequence[tuple[str, int]] = (),
    *,
    shares_port: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """Return a server with Baton's options, not bound yet. Call it on the event loop.

    Args:
        more: options added to SERVER_OPTIONS.
        shares_port: as for `bind`.
        max_message_bytes: larger messages are rejected before they are received.
    """
    options = {
        **dict(SERVER_OPTIONS),
        **dict(more),
        "grpc.so_reuseport": int(shares_port),
        "grpc.max_receive_message_length": max_message_bytes,
    }
    return grpc.aio.server(options=tuple(options.items()))


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    certificates: tls.Certificates | None = None,
    *,
    shares_port: bool = False,
    knob: str = PORT,
) -> int:
    """Bind a port, with TLS if there are certificates. Returns the port.

    Args:
        server: not started yet.
        host: address to listen on.
        port: 0 lets the system choose.
        certificates: None: no TLS.
        shares_port: share the port with other processes. The kernel distributes connections, and
            one process keeps the port `reserved`. Without this, a second server is rejected.
        knob: the flag that chose the port, for error messages.
    Raises:
        ConfigError: for example, the port is taken.
    """
    address = join_address(host, port)
    if not shares_port:
        _check_free(host, port, f"{knob}: cannot listen on {address}")
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials(certificates))
    except RuntimeError as error:
        raise ConfigError(f"{knob}: cannot listen on {address}") from error


def _check_free(host: str, port: int, refusal: str) -> None:
    """Check that a port is free. grpcio reports no reason, but writes a line to stderr."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"{refusal}: {error.strerror}") from error


@contextmanager
def reserved(host: str, port: int, *, knob: str = PORT) -> Iterator[int]:
    """Reserve a port for processes that share it, while inside the context. Yields its number.

    Args:
        host: address to listen on.
        port: 0 lets the system choose.
        knob: the flag that chose the port, for error messages.
    Raises:
        ConfigError: the port is taken, perhaps by other processes that share it.
    """
    with _holder(host, port, knob) as holder:
        yield int(holder.getsockname()[1])


def _holder(host: str, port: int, knob: str) -> socket.socket:
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind)
        try:
            # Like a listener: connections of an ended process do not block the port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(where)
            # From here on, only sockets that share the port can bind it. This socket never listens
            # and gets no connections.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        address = join_address(host, port)
        raise ConfigError(f"{knob}: cannot listen on {address}: {error.strerror}") from error
    return holder


async def stop(server: grpc.aio.Server, grace_s: float) -> None:
    """Refuse new calls, give running ones `grace_s` seconds and end the rest.

    Waits at most one second longer, so that a connection that does not read cannot block the
    process.
    """
    try:
        await asyncio.wait_for(server.stop(grace_s), grace_s + 1.0)
    except TimeoutError:
        log.warning("connections are still open %.1f s after the server stopped", grace_s + 1.0)
