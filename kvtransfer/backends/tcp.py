"""The data path that works everywhere: sockets of our own, host memory at both ends."""

from kvtransfer.backends.base import PagePool, RemotePool, check_host_memory, parse_description
from kvtransfer.backends.tcp_connection import TcpConnection
from kvtransfer.backends.tcp_owner import TcpOwner
from kvtransfer.backends.tcp_wire import Description


class TcpBackend:
    """Binds owners to `data_host`, which is also the address that readers are told."""

    name = "tcp"

    def __init__(self, data_host: str) -> None:
        self._data_host = data_host

    def serve(self, pool: PagePool, instance: int) -> TcpOwner:
        check_host_memory(self.name, pool)
        return TcpOwner(self._data_host, pool)

    def connect(
        self, description: bytes, remote: RemotePool, pool: PagePool, instance: int
    ) -> TcpConnection:
        check_host_memory(self.name, pool)
        parsed = parse_description(self.name, description, Description)
        return TcpConnection(parsed, remote, pool, instance)
