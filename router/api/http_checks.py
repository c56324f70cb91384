"""What is asked of every HTTP request before its body is read: by which name, from whose page, who.

In this order: who asks for this host by somebody else's name learns nothing else.
"""

from collections.abc import Sequence

from common.errors import RateLimited, ServingError
from common.metrics import RouterMetrics
from router.api.http.request import Check, Head, Peer, Refused, Request
from router.api.key_connections import KeyConnections
from router.api.openai import problems
from router.clients.client import Client
from router.clients.cors import Cors, Headers
from router.clients.guard import Guard
from router.clients.hosts import HostCheck

_OPEN = frozenset({"/", "/health", "/ready"})
_OPEN_BELOW = "/page/"
_FOR_OPERATORS = frozenset({"/cluster", "/requests", "/metrics"})
_FOR_OPERATORS_BELOW = "/requests/"


class HttpChecks:
    """For one event loop."""

    def __init__(self, guard: Guard, hosts: HostCheck, cors: Cors, metrics: RouterMetrics) -> None:
        self._guard = guard
        self._hosts = hosts
        self._cors = cors
        self._metrics = metrics
        self._connections = KeyConnections()
        self.in_order: Sequence[Check] = (self._host, self._preflight, self._access)

    def begin(self, request: Request, num_requests: int) -> Client:
        """Before the work on so many requests for text, that came as one which was let in.

        Raises:
            Unauthenticated: its key has gone since.
            RateLimited, InvalidRequest: as Usage.begin.
        """
        shown = _text(request, b"authorization")
        client = self._guard.client(shown, request.peer.host)
        self._guard.begin(client, num_requests)
        return client

    def headers(self, request: Request) -> Headers:
        """What every answer to it has, besides its own."""
        return self._cors.headers(request.path, _text(request, b"origin"))

    def closed(self, peer: Peer) -> None:
        """The connection has."""
        self._connections.closed(peer)

    def _host(self, head: Head) -> Refused | None:
        sentence = self._hosts.refusal(_text(head, b"host"))
        if sentence is None:
            return None
        self._metrics.stranger("host")
        return Refused(421, problems.error_body(421, sentence))

    def _preflight(self, head: Head) -> Refused | None:
        if head.method != "OPTIONS" or b"access-control-request-method" not in head.headers:
            return None
        wanted = _text(head, b"access-control-request-headers")
        headers = self._cors.preflight(head.path, _text(head, b"origin"), wanted)
        return Refused(200, b"", headers) if headers else None

    def _access(self, head: Head) -> Refused | None:
        if head.path in _OPEN or head.path.startswith(_OPEN_BELOW):
            return None
        operators = head.path in _FOR_OPERATORS or head.path.startswith(_FOR_OPERATORS_BELOW)
        ask = self._guard.operator if operators else self._guard.client
        try:
            client = ask(_text(head, b"authorization"), head.peer.host)
            self._admit(client, head.peer)
            if head.method == "POST":
                self._guard.begin(client, 0)
        except ServingError as error:
            refusal = problems.of_error(error, frozenset())
            return Refused(refusal.status, refusal.body, refusal.headers)
        return None

    def _admit(self, client: Client, connection: Peer) -> None:
        """Raises RateLimited."""
        try:
            self._connections.admit(client, connection)
        except RateLimited:
            self._metrics.rejected("limited")
            raise


def _text(head: Head | Request, name: bytes) -> str:
    return head.headers.get(name, b"").decode("latin-1")
