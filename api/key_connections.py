"""The number of open connections of each key, for keys with a limit of connections."""

from collections import Counter

from api.auth.client import Client
from api.http.shared import HttpPeer
from common.errors import RateLimited


class KeyConnections:
    """Open connections by key. For one event loop."""

    def __init__(self) -> None:
        self._shown: dict[HttpPeer, set[str]] = {}  # names of clients by connection
        self._open: Counter[str] = Counter()  # number of connections by name of client

    def admit(self, client: Client, connection: HttpPeer) -> None:
        """Count a connection for a client.

        Raises:
            RateLimited: the client has as many other open connections as allowed.
        """
        allowed = client.limits.connections
        shown = self._shown.get(connection, set())
        if allowed is None or client.name in shown:
            return
        if self._open[client.name] >= allowed:
            client.usage.refused()
            raise RateLimited(f"this key has {allowed} open connections, as many as it may have")
        self._shown[connection] = {*shown, client.name}
        self._open[client.name] += 1

    def closed(self, connection: HttpPeer) -> None:
        for name in self._shown.pop(connection, ()):
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]
