"""HTTP server for a metrics registry, on a separate port without authentication.

Each connection has a thread, one request and a few seconds. If there are too many, the oldest one
is closed: a scrape takes milliseconds, but an idle connection does not end.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from common.errors import ConfigError

MAX_CONNECTIONS = 16
_OUT_OF_DESCRIPTORS_S = 0.05
REQUEST_S = 5.0  # seconds from the connection to the last byte of the response


@contextlib.contextmanager
def served(
    registry: CollectorRegistry, host: str, port: int | None, *, request_s: float = REQUEST_S
) -> Iterator[int | None]:
    """Serve a registry over HTTP on separate threads while inside the context.

    Args:
        port: None: serve nothing. 0: the system chooses one.
        request_s: time limit of a connection, in seconds.
    Returns:
        The port.
    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        server = _Server(host, port, request_s)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    server.set_app(make_wsgi_app(registry))
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are frequent, and unauthenticated callers must not cause lines."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # connections that are not accepted yet

    def __init__(self, host: str, port: int, request_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._request_s = request_s
        self._since: dict[socket.socket, float] = {}  # start of each open connection, oldest first
        self._lock = Lock()
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection on the accepting thread, which retries after an error."""
        try:
            return super().get_request()
        except OSError:
            # The connection was closed in the backlog, or descriptors are temporarily used up.
            time.sleep(_OUT_OF_DESCRIPTORS_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, on the accepting thread."""
        with self._lock:
            self._since[request] = time.monotonic()
            if len(self._since) > MAX_CONNECTIONS:
                oldest = next(iter(self._since))
                del self._since[oldest]
                _end(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close late connections, twice a second, on the accepting thread."""
        late = time.monotonic() - self._request_s
        with self._lock:
            for request, since in self._since.items():
                if since < late:
                    _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: an error caused by a caller ends only that connection."""

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)  # unless it was closed already
        super().shutdown_request(request)


def _end(request: socket.socket) -> None:
    """Shut a connection down, so that threads that use it see its end."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
