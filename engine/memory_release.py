"""Release of the memory of a paused engine to the operating system, and its reallocation.

Addresses do not change, so that all references stay valid: reads across process boundaries,
compiled code and CUDA graphs. Only the contents are lost.

Released host memory may be accessed, because the system then allocates it again. Released GPU
memory must not be accessed. Other nodes therefore lose their access to its pages before it is
released, and get it back after it is reallocated.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import FailedPrecondition, ServingError
from common.pausing import KV_CACHE, WEIGHTS
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.pages import PageAllocator
from engine.sizing import free_bytes
from engine.update import WeightUpdater
from kernels.cpu.memory import release_memory
from kernels.cuda.driver import OutOfDeviceMemory
from kernels.cuda.virtual_memory import Region


class PageMemory(Protocol):
    """The memory of the pages of one or all ranks. Only one thread may use it at a time."""

    def release(self) -> None:
        """Return the memory to the system. Nothing may use the pages until `restore`."""
        ...

    def restore(self) -> None:
        """Allocate the memory again. Raise FailedPrecondition, without any change, if there is not
        enough."""
        ...


class HostMemory:
    """Pages in host memory, which the system allocates one by one when they are written.

    Args:
        num_ranks: ranks of the node on this host. Each has the same number of pages.
    """

    def __init__(self, pools: Sequence[Tensor], num_ranks: int) -> None:
        self._pools = pools
        self._num_ranks = num_ranks

    def release(self) -> None:
        for pool in self._pools:
            release_memory(pool)

    def restore(self) -> None:
        """Check that enough memory is free. The system allocates it when pages are written."""
        wanted = self._num_ranks * sum(pool.nbytes for pool in self._pools)
        left = free_bytes(torch.device("cpu"), 1.0)
        if wanted > left:
            raise FailedPrecondition(
                f"{wanted / 2**30:.2f} GiB are needed, {left / 2**30:.2f} GiB are free"
            )


class DeviceMemory:
    """Pages in a region of GPU memory. Pinned host pages are not released."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def release(self) -> None:
        self._region.release()

    def restore(self) -> None:
        try:
            self._region.map()
        except OutOfDeviceMemory as error:
            raise FailedPrecondition(str(error)) from error


def memory_of(pool: KVPool, host_pool: HostPool, num_ranks: int = 1) -> PageMemory:
    """Return the memory of a rank's pages. `num_ranks`: see HostMemory."""
    if pool.region is not None:
        return DeviceMemory(pool.region)
    return HostMemory((pool.tensor, host_pool.tensor), num_ranks)


class PeerAccess(Protocol):
    """The access of other nodes to the pages of this node, and of this node to theirs. Both calls
    block. Any thread may make them, one at a time."""

    def close(self) -> None:
        """End all access. Raise FailedPrecondition, without any change, if that takes too long.

        Afterwards no transfer reads or writes the pages, and no mapping or registration of them
        exists.
        """
        ...

    def open(self) -> None:
        """Allow access again. Raise ServingError, without any change, if that fails."""
        ...


class MemoryOccupation:
    """The memory of an engine that can be released. Engine thread only.

    Args:
        pinned: reason why the memory of pages cannot be released. Empty: it can.
        notify: called by another thread when an operation is done.
        peers: access of other nodes, which must end before pages are released. None: it may stay.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        pages: PageAllocator,
        memory: PageMemory,
        pinned: str,
        notify: Callable[[], None],
        peers: PeerAccess | None = None,
    ) -> None:
        self._peers = peers
        self._weights = weights
        self._pages = pages
        self._notify = notify
        self._memory = memory
        self._pinned = pinned
        self._worker = ThreadPoolExecutor(1, "memory")

    @property
    def unused(self) -> bool:
        """Return whether no page is held. Memory may be released only then."""
        return self._pages.num_free == self._pages.num_pages

    @property
    def isolates(self) -> bool:
        """Return whether `isolate` must precede a release of pages."""
        return self._peers is not None

    def check(self, tags: Collection[str]) -> None:
        """Raise FailedPrecondition if the memory of one of these tags cannot be released."""
        if KV_CACHE in tags and self._pinned:
            raise FailedPrecondition(f"{KV_CACHE}: {self._pinned}")
        if WEIGHTS in tags:
            self._weights.check_drainable()

    def isolate(self) -> Future[None]:
        """End the access of other nodes to the pages, until `restore`. Requires `isolates`. The
        future fails with FailedPrecondition, without any change, if that takes too long."""
        assert self._peers is not None
        return self._begin(self._peers.close)

    def release(self, tag: str) -> Future[Any]:
        """Release the memory. Requires `check`. Raise Overloaded during a weight update."""
        if tag == WEIGHTS:
            return self._weights.release()
        return self._begin(self._memory.release)

    def restore(self, tag: str) -> Future[Any]:
        """Reallocate the memory. Raise Overloaded during a weight update.

        The future fails with FailedPrecondition, without any change, if there is not enough memory
        or the weights are no longer available.
        """
        if tag == WEIGHTS:
            return self._weights.restore()
        return self._begin(self._restore)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        future = self._worker.submit(work)
        future.add_done_callback(lambda _: self._notify())
        return future

    def _restore(self) -> None:
        try:
            self._memory.restore()
            if self._peers is not None:
                self._peers.open()
        except ServingError as error:
            self._memory.release()
            raise FailedPrecondition(f"{KV_CACHE}: {error}") from error
