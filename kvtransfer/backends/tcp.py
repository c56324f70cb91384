"""The data path that works everywhere: sockets of our own, memory of any kind at either end."""

from collections.abc import Callable

from kvtransfer.backends.base import PagePool, RemotePool, parse_description
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.backends.tcp_connection import TcpConnection
from kvtransfer.backends.tcp_memory import HostMemory, Memory
from kvtransfer.backends.tcp_owner import TcpOwner
from kvtransfer.backends.tcp_staging import StagedMemory
from kvtransfer.backends.tcp_wire import Description


def memory_of(pool: PagePool) -> Memory:
    """Straight from and into host memory, staged where it is a device's. Raises TransferError
    where the pool is not where it says."""
    if pool.device == "cpu":
        return HostMemory(pool)
    return StagedMemory(pool, cuda_device(pool.device))


class TcpBackend:
    """Binds owners to `data_host`, which is also the address that readers are told."""

    name = "tcp"

    def __init__(self, data_host: str, memory_of: Callable[[PagePool], Memory] = memory_of) -> None:
        self._data_host = data_host
        self._memory_of = memory_of

    def serve(self, pool: PagePool, instance: int) -> TcpOwner:
        return TcpOwner(self._data_host, pool, self._memory_of(pool))

    def connect(
        self, description: bytes, remote: RemotePool, pool: PagePool, instance: int
    ) -> TcpConnection:
        parsed = parse_description(self.name, description, Description)
        return TcpConnection(parsed, remote, pool, self._memory_of(pool), instance)
