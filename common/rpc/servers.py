"""Servers, and the ports that they listen on. Knows nothing of what they serve."""

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


PORT, HEALTH_PORT = "--port", "--front.health-port"  # knobs, for sentences about them


def make_server(
    more: Sequence[tuple[str, int]] = (),
    *,
    shares_port: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server with our options, bound to nothing yet. Call it on the event loop.

    Args:
        more: options besides SERVER_OPTIONS.
        shares_port: as for `bind`.
        max_message_bytes: larger ones are refused before they are received.
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
    """Binds, with TLS if there are certificates to show, and returns the port, which port 0
    leaves to the system.

    Args:
        shares_port: with other processes, which the kernel deals connections out to; somebody has
            it `reserved`. A second server otherwise is refused.
        knob: the flag that chose the port, for the sentence.
    Raises:
        ConfigError: one sentence, such as that the port is taken.
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
    """grpcio does not say why it cannot listen, but writes a line of its own to stderr."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"{refusal}: {error.strerror}") from error


@contextmanager
def reserved(host: str, port: int, *, knob: str = PORT) -> Iterator[int]:
    """Keeps a port from everybody but those who share it, while inside; gives its number, which
    port 0 leaves to the system.

    Args:
        knob: the flag that chose the port, for the sentence.
    Raises:
        ConfigError: it is taken, perhaps by others who share it.
    """
    with _holder(host, port, knob) as holder:
        yield int(holder.getsockname()[1])


def _holder(host: str, port: int, knob: str) -> socket.socket:
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind)
        try:
            # As a listener would: connections of one that has ended do not count.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(where)
            # From here on it lets in who shares, and nobody else; never listening, it gets no
            # connection itself.
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
    """Refuses new calls, gives those under way `grace_s` and ends the rest.

    Waits no longer than that and a second: a connection that does not read must not hold the
    program.
    """
    try:
        await asyncio.wait_for(server.stop(grace_s), grace_s + 1.0)
    except TimeoutError:
        log.warning("connections are still open %.1f s after the server stopped", grace_s + 1.0)
