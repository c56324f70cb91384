"""How many open connections have shown each key, for keys that have a limit of them."""

from collections import Counter

from api.auth.client import Client
from api.http.shared import Peer
from common.errors import RateLimited


class KeyConnections:
    """For one event loop."""

    def __init__(self) -> None:
        self._shown: dict[Peer, set[str]] = {}  # by connection, names of clients
        self._open: Counter[str] = Counter()  # by name

    def admit(self, client: Client, connection: Peer) -> None:
        """
        Raises:
            RateLimited: as many others as allowed are open.
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

    def closed(self, connection: Peer) -> None:
        for name in self._shown.pop(connection, ()):
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]
