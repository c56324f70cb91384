"""The consumer's end of one nixl path: an agent made for one producer process, which copies alone.

The fence has two parts: the user thread leaves `copy`, then the agent is destroyed, because nothing
else ends a read that nixl has started. Device copies are waited for twice: before, so that no
mapping goes away during a copy, and after, for copies that the agent may have started as it ended.

Both ends register memory: their pool, and scratch pages of the same kind (`NixlMemory`).
"""

import math
import time
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import numpy as np

from common.errors import EngineFault, LayoutMismatch, TransferError
from kvtransfer.backends.base import Ints, PageCut, PagePool, RemotePool
from kvtransfer.backends.device_memory import DeviceFailure, cuda_device
from kvtransfer.backends.nixl.agent import NixlAgent
from kvtransfer.backends.nixl.paths import PathKind
from kvtransfer.backends.read_map import ReadMap
from kvtransfer.backends.scratch import ReadScratch, measure


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


_GIB = 1 << 30
_POLL_S = 20e-6
_MAX_DESCRIPTORS = 1 << 31  # nixl's indices are int32
_TRIES = 8  # rate measurements: two processes that share a device each run a few ms at a time


class NixlOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path to the producer."""

    path: Annotated[str, msgspec.Meta(max_length=16)]
    evidence: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class NixlDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description that PageProducer.admit returns."""

    device: Annotated[str, msgspec.Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
    scratch_base: Annotated[int, msgspec.Meta(ge=1, lt=1 << 57)]
    scratch_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    offers: Annotated[tuple[NixlOffer, ...], msgspec.Meta(min_length=1, max_length=8)]


@dataclass(frozen=True, slots=True)
class _Route:
    """Local pages and the producer's pages they are read from, as numbers of prepared lists."""

    source: int
    destination: int


class NixlConnection:
    """Reads over one proved path."""

    def __init__(
        self,
        kind: PathKind,
        offer: NixlOffer,
        description: NixlDescription,
        remote: RemotePool,
        memory: NixlMemory,
        reads: ReadMap,
        late: float,
    ) -> None:
        """Connect. Blocks until `late` by time.monotonic() at most."""
        pool = memory.pool
        num_pages = max(remote.num_pages, pool.num_pages)
        if len(reads.parts) * num_pages > _MAX_DESCRIPTORS:
            raise LayoutMismatch(f"{len(reads.parts)} parts of {num_pages} pages are too many")
        self._num_source = remote.num_pages
        self._num_destination = pool.num_pages
        self._map = reads
        # Probes read pages of this node's size, whatever the producer's is.
        self._page_bytes = pool.page_bytes
        theirs = description.scratch_pages * remote.page_bytes // pool.page_bytes
        self._scratch_pages = min(theirs, memory.scratch.num_pages)
        if not self._scratch_pages:
            raise TransferError(f"the producer has no {pool.page_bytes} bytes for probes")
        self._part_bytes = kind.part_bytes
        self._stopped = False
        self._memory = memory
        memory.use()
        self._proved = kind.prove(offer.evidence, offer.metadata, pool)
        try:
            self._agent = NixlAgent(kind.transports)
        except BaseException:
            self._proved.close()
            raise
        try:
            self._meet(offer, description, remote)
            self._make_contact(kind, late)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        return self._proved.path

    def probe(self) -> float:
        return measure(
            self._scratch_pages,
            self._page_bytes,
            lambda pages: self._read(self._scratch, pages, pages),
        )

    def copy(self, source_pages: Ints, destination_pages: Ints, table: int = 0) -> None:
        for number, there, here in self._map.reads(source_pages, destination_pages, table):
            there = there + number * self._num_source
            here = here + number * self._num_destination
            step = max(1, self._part_bytes // self._map.parts[number].size)
            for start in range(0, len(there), step):
                part = slice(start, start + step)
                self._read(self._pool, there[part], here[part])

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        self._memory.use()
        try:
            self._memory.settle()
            self._agent.destroy()
            self._memory.settle()
        except DeviceFailure as error:
            self._agent.destroy()
            raise EngineFault(f"bytes over {self.path} may yet land: {error}") from None
        self._proved.close()

    def _meet(self, offer: NixlOffer, description: NixlDescription, remote: RemotePool) -> None:
        """Register both sides' memory with the agent."""
        pool, scratch = self._memory.pool, self._memory.scratch
        self._agent.register(pool)
        self._agent.register(scratch)
        producer = self._agent.meet(offer.metadata)

        def route(base: int, here: int, page_bytes: int, num_pages: int) -> _Route:
            source = PagePool(base, page_bytes, num_pages, description.device)
            destination = PagePool(here, page_bytes, num_pages, pool.device)
            whole = [PageCut(0, page_bytes)]
            return _Route(
                self._agent.prepare(source, whole, producer),
                self._agent.prepare(destination, whole),
            )

        num_pages, num_bytes = self._scratch_pages, self._scratch_pages * pool.page_bytes
        source = PagePool(remote.base, remote.page_bytes, remote.num_pages, description.device)
        parts = self._map.parts
        self._pool = _Route(
            self._agent.prepare(
                source, [PageCut(each.source, each.size) for each in parts], producer
            ),
            self._agent.prepare(pool, [PageCut(each.at, each.size) for each in parts]),
        )
        self._scratch = route(description.scratch_base, scratch.base, pool.page_bytes, num_pages)
        self._block = route(description.scratch_base, scratch.base, num_bytes, 1)
        self._block_bytes = num_bytes

    def _make_contact(self, kind: PathKind, late: float) -> None:
        """Read scratch pages to prove the path. The producer has then been reached, without help of
        its process if it is not polled, and reads are as fast as expected of this path alone. The
        rate is that of one block, whatever the size of a page.
        """
        page = np.zeros(1, np.int32)
        self._read(self._scratch, page, page, late)
        best = 0.0
        for _ in range(_TRIES):
            if best >= kind.min_gib_per_s:
                return
            started = time.perf_counter()
            self._read(self._block, page, page, late)
            best = max(best, self._block_bytes / _GIB / (time.perf_counter() - started))
        if best < kind.min_gib_per_s:
            raise TransferError(f"reads do not use this path: they reach {best:.2f} GiB/s only")

    def _read(
        self, route: _Route, source_pages: Ints, destination_pages: Ints, late: float = math.inf
    ) -> None:
        """Read pages, until `late` by time.monotonic() at most."""
        if self._stopped:
            raise TransferError("the nixl connection has been stopped")
        landed = self._agent.post_read(
            route.destination, destination_pages, route.source, source_pages
        )
        while not landed:
            if self._stopped or time.monotonic() > late:
                raise TransferError("no read of the producer's memory has landed in time")
            time.sleep(_POLL_S)
            landed = self._agent.read_has_landed()
