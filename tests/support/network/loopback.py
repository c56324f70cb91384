"""A data path inside one process, for tests. The backend object is the whole network.

It copies between two pools of this process and rejects pages that are not published. Each producer
has a `faults` object with which a test delays, freezes, cuts or fails copies.
"""

import ctypes
import itertools
import struct
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from kvtransfer.backends.base import (
    Ints,
    PagePool,
    PartRead,
    PoolRegion,
    PublishedPages,
    ReadMap,
    ReadRefused,
    TableSlices,
    prepared,
)
from kvtransfer.backends.scratch import ReadScratch, measure

_DESCRIPTION = struct.Struct("<QQ")  # the producer's instance and the consumer's number
_PART_BYTES = 4 << 20  # bytes copied between two checks of whether the connection has ended


class LoopbackFaults:
    """Faults injected into the copies from one producer. For any thread.

    A copy lands the first half of its pages, pauses if it is delayed or frozen, then lands the
    rest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._scripted: deque[tuple[str, bool]] = deque()  # reason, whether half has landed
        self._delay_s = 0.0
        self._frozen = False
        self._num_resting = 0
        self._num_corrupt = 0

    def delay(self, seconds: float) -> None:
        """Make every later copy pause this long between its halves."""
        with self._changed:
            self._delay_s = seconds

    def freeze(self) -> None:
        """Make copies pause between their halves until `release` or the end of their connection."""
        with self._changed:
            self._frozen = True

    def release(self) -> None:
        with self._changed:
            self._frozen = False
            self._changed.notify_all()

    def wait_until_resting(self, num_copies: int, timeout_s: float) -> bool:
        """Wait until this number of copies is delayed or frozen between their halves."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_resting >= num_copies, timeout_s)

    def fail_next(self, reason: str) -> None:
        """Make the next copy without another fault raise before any byte has landed."""
        with self._changed:
            self._scripted.append((reason, False))

    def truncate_next(self, reason: str) -> None:
        """Make the next copy without another fault raise after half of its pages have landed."""
        with self._changed:
            self._scripted.append((reason, True))

    def corrupt_next(self) -> None:
        """Change one byte in the first page of the next copy that lands completely."""
        with self._changed:
            self._num_corrupt += 1

    def corrupts(self) -> bool:
        with self._changed:
            corrupts = self._num_corrupt > 0
            self._num_corrupt -= corrupts
            return corrupts

    def take(self) -> tuple[str, bool] | None:
        with self._changed:
            return self._scripted.popleft() if self._scripted else None

    def rest(self, ended: threading.Event) -> None:
        """Pause a copy between its halves. `ended` is set before `wake` is called."""
        with self._changed:
            self._num_resting += 1
            self._changed.notify_all()
            self._changed.wait_for(ended.is_set, self._delay_s)
            self._changed.wait_for(lambda: ended.is_set() or not self._frozen)
            self._num_resting -= 1

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class LoopbackProducer:
    """A producer of a LoopbackBackend."""

    def __init__(self, backend: "LoopbackBackend", pool: PagePool, instance: int) -> None:
        self.faults = LoopbackFaults()
        self.publications = PublishedPages(pool.num_pages)
        self.scratch = ReadScratch(pool.page_bytes)
        self.pool = pool
        self._backend = backend
        self._instance = instance

    def prepare(self, consumer: int) -> Future[Any]:
        return prepared()

    def admit(self, consumer: int) -> bytes:
        self._backend.admit(self._instance, consumer)
        return _DESCRIPTION.pack(self._instance, consumer)

    def dismiss(self, consumer: int) -> None:
        self._backend.dismiss(self._instance, consumer)
        self.publications.forget(consumer)

    def poll(self) -> None:
        """Do nothing: connections access the producer directly."""

    def close(self) -> None:
        self._backend.end(self._instance)


class LoopbackConnection:
    """One consumer's copies from one LoopbackProducer."""

    path = "loopback"

    def __init__(self, producer: LoopbackProducer, reads: ReadMap, pool: PagePool, consumer: int):
        self._producer = producer
        self._map = reads
        self._pool = pool
        self._consumer = consumer
        self._scratch = ReadScratch(pool.page_bytes)
        self._ended = threading.Event()
        self._copying = threading.Lock()

    def probe(self) -> float:
        scratch = self._scratch.pool
        return measure(scratch.num_pages, scratch.page_bytes, self._probe)

    def copy(self, source_pages: Ints, destination_pages: Ints, table: int = 0) -> None:
        faults = self._producer.faults
        reads = self._map.reads(source_pages, destination_pages, table)
        self._check_alive()
        refused = self._producer.publications.first_refused(self._consumer, source_pages)
        if refused is not None:
            raise ReadRefused(f"the producer does not publish page {refused} to this consumer")
        fault = faults.take()
        if fault is not None and not fault[1]:
            raise TransferError(fault[0])
        for read in reads:
            self._land(read, slice(len(read.source_pages) // 2))
        if fault is not None:
            raise TransferError(fault[0])
        faults.rest(self._ended)
        for read in reads:
            self._land(read, slice(len(read.source_pages) // 2, None))
        if len(destination_pages) and faults.corrupts():
            _memory(self._pool)[destination_pages[0], self._map.parts[0].at] ^= 1

    def stop(self) -> None:
        self._ended.set()
        self._producer.faults.wake()

    def end(self) -> None:
        """Stop because the producer has ended.

        Waits for the part in progress, because the producer's pool may be freed afterwards.
        """
        self.stop()
        with self._copying:
            pass

    def close(self) -> None:
        self.stop()

    def _probe(self, pages: Ints) -> None:
        with self._copying:
            self._check_alive()
            num_bytes = len(pages) * self._pool.page_bytes
            there = _memory(self._producer.scratch.pool).reshape(-1)[:num_bytes]
            _memory(self._scratch.pool).reshape(-1)[: len(there)] = there

    def _land(self, read: PartRead, some: slice) -> None:
        source, at, size = self._map.parts[read.part]
        sources, destinations = read.source_pages[some], read.destination_pages[some]
        step = max(1, _PART_BYTES // size)
        for start in range(0, len(sources), step):
            there, here = sources[start : start + step], destinations[start : start + step]
            with self._copying:
                self._check_alive()
                _memory(self._pool)[here, at : at + size] = _memory(self._producer.pool)[
                    there, source : source + size
                ]

    def _check_alive(self) -> None:
        if self._ended.is_set():
            raise TransferError("the loopback connection has ended")


class LoopbackBackend:
    """Producers and consumers of one LoopbackBackend reach each other, and no others."""

    name = "loopback"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producers: dict[int, LoopbackProducer] = {}
        # By producer and admitted consumer.
        self._connections: dict[tuple[int, int], list[LoopbackConnection]] = {}

    def serve(self, pool: PagePool, instance: int) -> LoopbackProducer:
        _check_host_memory(pool)
        producer = LoopbackProducer(self, pool, instance)
        with self._lock:
            self._producers[instance] = producer
        return producer

    def connect(
        self,
        description: bytes,
        remote: PoolRegion,
        pool: PagePool,
        slices: TableSlices | None = None,
    ) -> LoopbackConnection:
        _check_host_memory(pool)
        reads = ReadMap(remote, pool, slices)
        if len(description) != _DESCRIPTION.size:
            raise TransferError("not a description of loopback")
        instance, consumer = _DESCRIPTION.unpack(description)
        with self._lock:
            producer = self._producers.get(instance)
            if producer is None:
                raise TransferError(f"no producer {instance:016x} on this loopback")
            if (instance, consumer) not in self._connections:
                raise TransferError(f"producer {instance:016x} does not admit consumer {consumer}")
            connection = LoopbackConnection(producer, reads, pool, consumer)
            self._connections[instance, consumer].append(connection)
            return connection

    def admit(self, instance: int, consumer: int) -> None:
        """Allow a consumer to connect to a producer."""
        with self._lock:
            self._connections.setdefault((instance, consumer), [])

    def dismiss(self, instance: int, consumer: int) -> None:
        """End the consumer's connections to a producer. Copies over them raise from now on."""
        with self._lock:
            connections = self._connections.pop((instance, consumer), [])
        for connection in connections:
            connection.stop()

    def faults(self, instance: int) -> LoopbackFaults:
        """Return the faults of a live producer."""
        with self._lock:
            return self._producers[instance].faults

    def end(self, instance: int) -> None:
        """Close a producer. Copies from it raise from now on. Idempotent."""
        with self._lock:
            self._producers.pop(instance, None)
            consumers = [
                consumer for producer, consumer in self._connections if producer == instance
            ]
            connections = [self._connections.pop((instance, consumer)) for consumer in consumers]
        for connection in itertools.chain(*connections):
            connection.end()


def _check_host_memory(pool: PagePool) -> None:
    if pool.device != "cpu":
        raise TransferError(f"loopback moves host memory only, and this pool is on {pool.device}")


def _memory(pool: PagePool) -> NDArray[np.uint8]:  # [num_pages, page_bytes]
    memory = (ctypes.c_uint8 * (pool.num_pages * pool.page_bytes)).from_address(pool.base)
    return np.ctypeslib.as_array(memory).reshape(pool.num_pages, pool.page_bytes)
