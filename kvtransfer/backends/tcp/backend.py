"""The tcp backend: works between any two hosts, and with host or device memory at either end."""

from collections.abc import Callable

from common.errors import TransferError
from kvtransfer.backends.base import PagePool, PoolRegion, ReadMap, TableSlices, parse_description
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.backends.tcp.connection import TcpConnection
from kvtransfer.backends.tcp.memory import TcpHostMemory, TcpMemory
from kvtransfer.backends.tcp.producer import TcpProducer
from kvtransfer.backends.tcp.staging import StagedMemory
from kvtransfer.backends.tcp.tls import ProducerTls
from kvtransfer.backends.tcp.wire import TcpDescription

_ALIKE = "transfer.encrypt (and with auto, server.tls) must be the same on both nodes"


def memory_of(pool: PagePool) -> TcpMemory:
    """Return the memory of a pool. Host memory is used in place, device memory is staged. Raises
    TransferError if the pool is not on the named device.
    """
    if pool.device == "cpu":
        return TcpHostMemory(pool)
    return StagedMemory(pool, cuda_device(pool.device))


class TcpBackend:
    """The tcp backend.

    Producers bind to `data_host` and `data_port`, and consumers connect to the same address. With
    port 0 each producer binds a free port, so one backend may serve several pools. With
    `encrypted`, pages are sent over TLS, and peers without TLS are rejected.
    """

    name = "tcp"

    def __init__(
        self,
        data_host: str,
        memory_of: Callable[[PagePool], TcpMemory] = memory_of,
        *,
        data_port: int = 0,
        encrypted: bool = False,
    ) -> None:
        self._data_host = data_host
        self._data_port = data_port
        self._memory_of = memory_of
        self._encrypted = encrypted

    def serve(self, pool: PagePool, instance: int) -> TcpProducer:
        memory, tls = self._memory_of(pool), _tls() if self._encrypted else None
        return TcpProducer(self._data_host, self._data_port, pool, memory, tls)

    def connect(
        self,
        description: bytes,
        remote: PoolRegion,
        pool: PagePool,
        slices: TableSlices | None = None,
    ) -> TcpConnection:
        parsed = parse_description(self.name, description, TcpDescription)
        if self._encrypted and not parsed.certificate:
            raise TransferError(f"this node encrypts pages and the producer does not: {_ALIKE}")
        if parsed.certificate and not self._encrypted:
            raise TransferError(f"the producer encrypts pages and this node does not: {_ALIKE}")
        reads = ReadMap(remote, pool, slices)
        return TcpConnection(parsed, remote, pool, self._memory_of(pool), reads)


def _tls() -> ProducerTls:
    # Imported here because it is slow to load.
    from kvtransfer.backends.tcp.certificate import make_producer_tls

    return make_producer_tls()
