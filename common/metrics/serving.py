"""A registry over HTTP, on a port of its own that anybody may connect to.

Each connection has a thread, one request and few seconds. Of too many at once the oldest makes
room: who scrapes is done in milliseconds, who is silent is not.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from common.errors import ConfigError

MAX_CONNECTIONS = 16
_OUT_OF_DESCRIPTORS_S = 0.05
REQUEST_S = 5.0  # from the connection to the answer's last byte


@contextlib.contextmanager
def served(
    registry: CollectorRegistry, host: str, port: int | None, *, request_s: float = REQUEST_S
) -> Iterator[int | None]:
    """Serves a registry over HTTP on threads of its own while inside.

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
        """A scrape is no news, and strangers write no lines."""


class _Server(WSGIServer):
    request_queue_size = 128  # connections that nobody has accepted yet

    def __init__(self, host: str, port: int, request_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._request_s = request_s
        self._since: dict[socket.socket, float] = {}  # of open connections, the oldest first
        self._lock = Lock()
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """On the thread that accepts, which asks again at once where this fails."""
        try:
            return super().get_request()
        except OSError:
            # It died in the backlog, or no descriptors are left for a moment.
            time.sleep(_OUT_OF_DESCRIPTORS_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the thread that accepts."""
        with self._lock:
            self._since[request] = time.monotonic()
            if len(self._since) > MAX_CONNECTIONS:
                oldest = next(iter(self._since))
                del self._since[oldest]
                _end(oldest)
        thread = Thread(target=self._answer, args=(request, client_address), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process can start none now
            self._over(request)

    def service_actions(self) -> None:
        """Twice a second, on the thread that accepts."""
        late = time.monotonic() - self._request_s
        with self._lock:
            for request, since in self._since.items():
                if since < late:
                    _end(request)

    def _answer(self, request: Any, client_address: Any) -> None:
        # What a stranger can do to this code, it costs that connection and no line in the log.
        with contextlib.suppress(Exception):
            self.finish_request(request, client_address)
        self._over(request)

    def _over(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)  # unless it has made room
        self.shutdown_request(request)


def _end(request: socket.socket) -> None:
    """Whoever reads or writes it is told its end."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
