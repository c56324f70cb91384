"""Memory that one end of the nixl backend registers: its pool, and scratch pages of the
same kind.
"""

from typing import Protocol

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.backends.scratch import ReadScratch


class NixlMemory(Protocol):
    """A pool and its scratch pages. Kept for as long as an agent has them registered."""

    pool: PagePool
    scratch: PagePool

    def use(self) -> None:
        """Prepare the calling thread. Every thread calls it before it calls an agent."""
        ...

    def settle(self) -> None:
        """Return when all work that agents gave the device has finished, including agents that no
        longer exist.

        Raises:
            DeviceFailure: this cannot be determined.
        """
        ...


class NixlHostMemory:
    """Host memory: agents copy it themselves, so no copy outlives its agent."""

    def __init__(self, pool: PagePool) -> None:
        self._scratch = ReadScratch(pool.page_bytes)
        self.pool = pool
        self.scratch = self._scratch.pool

    def use(self) -> None:
        """Do nothing: any thread may call agents."""

    def settle(self) -> None:
        """Do nothing: no copy is left."""


class NixlCudaMemory:
    """Device memory: UCX lets the device copy on UCX's own streams, and does not wait for it on
    close.

    Every forward that is launched after a copy has landed sees its data: the device orders work
    behind what the host has seen done. CUDA promises the same for data that a network card writes
    into device memory, for work that is launched after the card has notified the host (GPUDirect
    RDMA, Synchronization and NixlMemory Ordering).
    """

    def __init__(self, pool: PagePool) -> None:
        """Raise TransferError if the pool is not on that device or device memory is short."""
        self._device = cuda_device(pool.device)
        self._device.use()
        self._device.view(pool)
        self._scratch = self._device.scratch(pool.page_bytes)
        self.pool = pool
        self.scratch = self._scratch.pool

    def use(self) -> None:
        self._device.use()

    def settle(self) -> None:
        self._device.synchronise()


def memory_of(pool: PagePool) -> NixlMemory:
    """Return the memory of a pool. Raises TransferError if the pool is not on the device
    it names.
    """
    return NixlHostMemory(pool) if pool.device == "cpu" else NixlCudaMemory(pool)
