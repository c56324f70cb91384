"""What one end of the nixl backend has to register: its pool and scratch pages of the same kind."""

from typing import Protocol

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.backends.scratch import Scratch


class Memory(Protocol):
    """A pool and scratch pages beside it. Kept for as long as an agent has them registered."""

    pool: PagePool
    scratch: PagePool

    def use(self) -> None:
        """Called by every thread before it calls an agent."""
        ...

    def settle(self) -> None:
        """Returns when nothing is left of what agents have told the device to do, those that are
        gone included.

        Raises:
            DeviceFailure: nobody knows.
        """
        ...


class HostMemory:
    """Agents copy host memory themselves, and what is gone copies nothing."""

    def __init__(self, pool: PagePool) -> None:
        self._scratch = Scratch(pool.page_bytes)
        self.pool = pool
        self.scratch = self._scratch.pool

    def use(self) -> None:
        """Nothing to do: any thread may."""

    def settle(self) -> None:
        """Nothing to do: nothing is left."""


class CudaMemory:
    """UCX has the device copy, on streams of its own, and does not wait for it when it is closed.

    A copy that has landed is seen by every forward that is launched later: the device orders work
    behind what the host has seen done. Of what a network card writes into the device's memory
    CUDA promises the same for work that is launched after the card has told the host (GPUDirect
    RDMA, Synchronization and Memory Ordering).
    """

    def __init__(self, pool: PagePool) -> None:
        """Raises TransferError where the pool is not on that device, or its memory is short."""
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


def memory_of(pool: PagePool) -> Memory:
    """Raises TransferError where the pool is not where it says."""
    return HostMemory(pool) if pool.device == "cpu" else CudaMemory(pool)
