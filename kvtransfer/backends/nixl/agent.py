"""A wrapper of a NIXL agent, and `NixlConnection`, the consumer's end of a one-sided path.

A connection has an agent of its own. An agent may copy as long as it exists, whatever its handles
report. It exists as long as anything refers to it: descriptor lists, transfer handles, or the
frames of a traceback. Therefore only `NixlAgent` holds such references, and `destroy` checks that
none is left.

Closing a connection guarantees that no more bytes arrive. The user thread first leaves `copy`. Then
the agent is destroyed, because nothing else ends a read that NIXL has started. For device memory,
`close` waits for copies twice: before destroying the agent, so that no mapping goes away during a
copy, and afterwards, for copies that the agent started last.

Both ends register two pieces of memory: their pool, and scratch pages of the same kind
(`NixlMemory`).
"""

import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFault, LayoutMismatch, TransferError
from kvtransfer.backends.base import Ints, PageCut, PagePool, PoolRegion, ReadMap
from kvtransfer.backends.device_memory import DeviceFailure, cuda_device
from kvtransfer.backends.nixl.paths import HOST, NixlTransports, PathKind
from kvtransfer.backends.scratch import ReadScratch, measure

_TRANSPORTS, _DEVICES, _LINK = "UCX_TLS", "UCX_NET_DEVICES", "UCX_POSIX_USE_PROC_LINK"
_ENVIRONMENT = {
    _TRANSPORTS: HOST.names,  # for agents created elsewhere. NixlAgent sets its own
    _DEVICES: "all",
    # Otherwise the memory has a name in /dev/shm and stays there if its process is killed.
    _LINK: "y",
    # Agents send no data through this shared memory. 64 entries need 90 KB of /dev/shm per agent
    # instead of 4.3 MB, and containers have only 64 MB.
    "UCX_POSIX_FIFO_SIZE": "64",
    "UCX_POSIX_SEG_SIZE": "1024",
    "UCX_POSIX_RX_BUFS_GROW": "64",
    # Without it, UCX needs the producer's help to read between GPUs that have no NVLink.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    # Otherwise UCX keeps the memory of every producer mapped until this process ends, also of dead
    # ones, and that memory cannot be reused. device_proof.py keeps it mapped while it is needed.
    "UCX_CUDA_IPC_CACHE": "n",
    # Both libraries write to stderr whenever a peer dies. The caller gets an exception anyway.
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
_import_lock = threading.Lock()
_log = logging.getLogger(__name__)


class NixlAgent:
    """A NIXL agent, for one thread at a time. All methods but `destroy` may raise TransferError."""

    def __init__(self, transports: NixlTransports = HOST) -> None:
        """Create an agent for these transports. Takes 10 ms, or 2 s for a process's first agent."""
        self._lists: list[Any] = []
        self._reading: Any = None
        self._agent = _call(_new_agent, transports)

    def register(self, pool: PagePool) -> None:
        """Register a pool. Device memory must be on the calling thread's current device."""
        whole = PagePool(pool.base, pool.num_pages * pool.page_bytes, 1, pool.device)
        rows = descriptors(whole, [PageCut(0, whole.page_bytes)])
        _call(self._agent.register_memory, rows, segment(pool.device)[0])

    def metadata(self) -> bytes:
        """Return the metadata for another agent's `meet`. Covers all memory registered so far."""
        return bytes(_call(self._agent.get_agent_metadata))

    def meet(self, metadata: bytes) -> Any:
        """Load another agent's metadata and return its name, for `prepare`. UCX aborts the process
        on some forged metadata, so pass only metadata that is proved to be the producer's.
        """
        try:
            return _call(self._agent.add_remote_agent, metadata)
        except TransferError as error:
            raise TransferError(f"the producer's agent is unreachable: {error}") from None

    def prepare(
        self, pool: PagePool, parts: Sequence[PageCut], remote: Any = "NIXL_INIT_AGENT"
    ) -> int:
        """Prepare descriptors of these parts of all pages of a pool. Part p of page i has the index
        p * num_pages + i.

        Args:
            remote: name of the agent that owns the pool. Default: this agent.
        Returns:
            A number that names the descriptor list in `post_read`.
        """
        kind, _ = segment(pool.device)
        made = _call(self._agent.prep_xfer_dlist, remote, descriptors(pool, parts), kind)
        self._lists.append(made)
        return len(self._lists) - 1

    def post_read(self, local: int, here: Ints, remote: int, there: Ints) -> bool:
        """Start a read of these descriptor indices. Returns True if it has already finished. CMA
        copies inside this call.
        """
        return self._has_landed(_call(self._begin, local, here, remote, there))

    def read_has_landed(self) -> bool:
        """Return whether the latest read has finished. Do not call again after it returned True."""
        return self._has_landed(_call(self._agent.check_xfer_state, self._reading))

    def poll(self) -> None:
        """Let other agents connect."""
        _call(self._agent.get_new_notifs)

    def destroy(self) -> None:
        """Destroy the agent, and with it every read in progress. Idempotent.

        Raises:
            EngineFault: a reference to the agent is left, so bytes may still arrive.
        """
        if self._agent is None:
            return
        agent = weakref.ref(self._agent.agent)
        _release(self._reading)
        self._reading = None
        while self._lists:
            _release(self._lists.pop())
        self._agent = None
        if agent() is not None:
            raise EngineFault("a nixl agent still exists after its connection was closed")

    def _begin(self, local: int, here: Ints, remote: int, there: Ints) -> Any:
        self._reading = self._agent.make_prepped_xfer(
            "READ", self._lists[local], here, self._lists[remote], there
        )
        return self._agent.transfer(self._reading)

    def _has_landed(self, state: str) -> bool:
        match state:
            case "DONE":
                _release(self._reading)
                self._reading = None
                return True
            case "PROC":
                return False
            case _:
                raise TransferError(f"nixl: the read ended as {state}")


def segment(device: str) -> tuple[str, int]:
    """Return NIXL's name for the memory of a device, and the device number."""
    if device == "cpu":
        return "DRAM", 0
    return "VRAM", int(device.partition(":")[2] or 0)


def descriptors(pool: PagePool, parts: Sequence[PageCut]) -> NDArray[np.uint64]:
    """Return descriptors as uint64 [num_parts * num_pages, 3]: address, bytes and device of each
    part of each page.
    """
    made = np.empty((len(parts), pool.num_pages, 3), np.uint64)
    made[:, :, 0] = np.arange(pool.num_pages, dtype=np.uint64)
    made[:, :, 0] *= np.uint64(pool.page_bytes)
    made[:, :, 0] += np.uint64(pool.base)
    for number, (at, size) in enumerate(parts):
        made[number, :, 0] += np.uint64(at)
        made[number, :, 1] = size
    made[:, :, 2] = segment(pool.device)[1]
    return made.reshape(-1, 3)


def load() -> Any:
    """Import NIXL's Python API. Sets defaults for environment variables that are not set."""
    with _import_lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # UCX reads most of them when it is loaded
        import nixl._api as api
    return api


def _new_agent(transports: NixlTransports) -> Any:
    api = load()
    agent = api.nixl_agent(
        uuid.uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=[])
    )
    if "UCX" not in agent.get_plugin_list():
        raise TransferError("its UCX plugin is missing")
    forced = {_TRANSPORTS: transports.names, _LINK: _ENVIRONMENT[_LINK]}
    with _import_lock, _set(forced | {_DEVICES: transports.devices()}):
        agent.create_backend("UCX", {"ucx_error_handling_mode": transports.errors})
    return agent


@contextmanager
def _set(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, because UCX reads them for every new agent. The
    variables already exist. The C library then replaces values in place, which is safe for threads
    that read the environment.
    """
    before = {name: os.environ[name] for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.update(before)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NIXL, and raise its errors as TransferError without references to the agent. Otherwise
    the frames of an error in flight would keep the agent alive during `destroy`.
    """
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 the errors of nixl have no base of their own
        error.__traceback__ = None
        del function, arguments
        raise TransferError(f"nixl: {error}") from None


def _release(handle: Any) -> None:
    """Release a handle. NIXL may refuse while a read is in progress. That is harmless, because
    destroying the agent ends the read.
    """
    if handle is not None:
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001 as above
            _log.debug("nixl handle not released: %s", error)


class NixlMemory(Protocol):
    """A pool and its scratch pages. Kept as long as an agent has them registered."""

    pool: PagePool
    scratch: PagePool

    def use(self) -> None:
        """Prepare the calling thread. Every thread calls it before it uses an agent."""
        ...

    def settle(self) -> None:
        """Block until the device has finished all work of agents, including destroyed ones.

        Raises:
            DeviceFailure: the state of the device is unknown.
        """
        ...


class NixlHostMemory:
    """Host memory. Agents copy it on the calling thread, so no copy outlives its agent."""

    def __init__(self, pool: PagePool) -> None:
        self._scratch = ReadScratch(pool.page_bytes)
        self.pool = pool
        self.scratch = self._scratch.pool

    def use(self) -> None:
        """No-op: any thread may call agents."""

    def settle(self) -> None:
        """No-op: no copy outlives its agent."""


class NixlCudaMemory:
    """Device memory. UCX copies it on streams of its own and does not wait for them on close.

    A forward pass launched after a copy has finished sees the copied data, because the device
    orders new work after work that the host has seen completed. CUDA guarantees the same for data
    written by a network card, for work launched after the card has notified the host (GPUDirect
    RDMA, Synchronization and Memory Ordering).
    """

    def __init__(self, pool: PagePool) -> None:
        """Raises TransferError if the pool is not on the named device, or memory is short."""
        self._device = cuda_device(pool.device)
        self._device.use()
        self._device.view(pool)
        self._scratch = self._device.scratch(pool.page_bytes)
        num_pages, device = len(self._scratch), str(self._scratch.device)
        self.pool = pool
        self.scratch = PagePool(self._scratch.data_ptr(), pool.page_bytes, num_pages, device)

    def use(self) -> None:
        self._device.use()

    def settle(self) -> None:
        self._device.synchronise()


def memory_of(pool: PagePool) -> NixlMemory:
    """Return the memory of a pool. Raises TransferError if the pool is not on the named device."""
    return NixlHostMemory(pool) if pool.device == "cpu" else NixlCudaMemory(pool)


_GIB = 1 << 30
_POLL_S = 20e-6
_MAX_DESCRIPTORS = 1 << 31  # nixl's indices are int32
_TRIES = 8  # rate measurements: processes that share a GPU take turns of a few ms


class NixlOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path to the producer, as offered to one consumer."""

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
    """A pair of prepared descriptor lists: local pages, and the producer's pages to read into
    them.
    """

    source: int
    destination: int


class NixlConnection:
    """A consumer's connection over one proved path."""

    def __init__(
        self,
        kind: PathKind,
        offer: NixlOffer,
        description: NixlDescription,
        remote: PoolRegion,
        memory: NixlMemory,
        reads: ReadMap,
        late: float,
    ) -> None:
        """Connect. Raises TransferError if a read is not completed by `late` (time.monotonic())."""
        pool = memory.pool
        num_pages = max(remote.num_pages, pool.num_pages)
        if len(reads.parts) * num_pages > _MAX_DESCRIPTORS:
            raise LayoutMismatch(f"{len(reads.parts)} parts of {num_pages} pages are too many")
        self._num_source = remote.num_pages
        self._num_destination = pool.num_pages
        self._map = reads
        # Probes read pages of the local size, whatever the producer's page size is.
        self._page_bytes = pool.page_bytes
        theirs = description.scratch_pages * remote.page_bytes // pool.page_bytes
        self._scratch_pages = min(theirs, memory.scratch.num_pages)
        if not self._scratch_pages:
            raise TransferError(
                f"the scratch memory of the producer is smaller than a page of "
                f"{pool.page_bytes} bytes"
            )
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
            raise EngineFault(
                f"a read over {self.path} may still write to the pool: {error}"
            ) from None
        self._proved.close()

    def _meet(self, offer: NixlOffer, description: NixlDescription, remote: PoolRegion) -> None:
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
        """Read scratch pages to prove the path. Success shows that the producer was reached without
        its help (unless it is polled), and that the rate is that of this path. The rate is measured
        on one block and does not depend on the page size.
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
            raise TransferError(f"reads do not use this path: they reach only {best:.2f} GiB/s")

    def _read(
        self, route: _Route, source_pages: Ints, destination_pages: Ints, late: float = math.inf
    ) -> None:
        """Read pages. Raises TransferError if stopped, or at `late` (time.monotonic())."""
        if self._stopped:
            raise TransferError("the nixl connection has been stopped")
        landed = self._agent.post_read(
            route.destination, destination_pages, route.source, source_pages
        )
        while not landed:
            if self._stopped or time.monotonic() > late:
                raise TransferError("no read of the producer's memory has completed in time")
            time.sleep(_POLL_S)
            landed = self._agent.read_has_landed()
