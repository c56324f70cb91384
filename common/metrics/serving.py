"""A registry over HTTP, on a port of its own."""

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError


@contextlib.contextmanager
def served(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[int | None]:
    """Serves a registry over HTTP on a thread of its own while inside.

    Args:
        port: None serves nothing; 0 leaves the choice to the system.
    Returns:
        The port.
    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
