"""Pages of a device over tcp, staged in host memory. A read ends only when the device has them."""

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.errors import EngineFault, TransferError
from kvtransfer.backends.base import BackendConnection, ReadRefused
from kvtransfer.backends.tcp.backend import TcpBackend
from kvtransfer.backends.tcp.producer import TcpProducer
from kvtransfer.backends.tcp.staging import StagedMemory
from kvtransfer.backends.tcp.wire import REPLY, REQUEST
from tests.support.hardware.device_twin import DeviceTwin
from tests.support.network.data_children import CANARY, CONSUMER, Memory, content, scattered
from tests.support.network.data_ends import introduced, wait_for

NUM_PAGES, PAGE_BYTES = 600, 16384  # several requests for all of them
ALL = np.arange(NUM_PAGES, dtype=np.int32)


class Rig:
    """A producer and a consumer in this process, each with a device of its own."""

    def __init__(self, num_pages: int = NUM_PAGES, page_bytes: int = PAGE_BYTES) -> None:
        self.there, self.here = DeviceTwin(), DeviceTwin()
        self.source, self.memory = Memory(num_pages, page_bytes), Memory(num_pages, page_bytes)
        self.source.pages[:] = content(0, num_pages, page_bytes)
        self.producer: TcpProducer = staged(self.there).serve(self.source.pool, 1)
        self.producer.publications.publish(CONSUMER, np.arange(num_pages, dtype=np.int32))
        self.connections: list[BackendConnection] = []

    def connect(self) -> BackendConnection:
        connection = staged(self.here).connect(
            self.producer.admit(CONSUMER), self.source.remote, self.memory.pool
        )
        self.connections.append(connection)
        return connection

    def end(self) -> None:
        for device in (self.there, self.here):
            for queue in device.queues.values():
                queue.release()
        for connection in self.connections:
            connection.stop()
            with contextlib.suppress(EngineFault):
                connection.close()
        self.producer.close()
        for device in (self.there, self.here):
            device.end()


def staged(device: DeviceTwin) -> TcpBackend:
    return TcpBackend("127.0.0.1", lambda pool: StagedMemory(pool, device))


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*sizes: int) -> Rig:
        rigs.append(Rig(*sizes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.end()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


# Seen failing without `use` in `StagedMemory`, and without it in `departures`.
def test_every_thread_of_a_connection_selects_its_device(rig):
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)

    def link() -> None:
        connection = rig.connect()
        connection.probe()
        connection.copy(source, destination)
        connection.close()

    thread = threading.Thread(target=link, name="link")
    thread.start()
    thread.join()
    assert rig.there.users.strays == rig.here.users.strays == []
    assert (rig.memory.pages[destination] == rig.source.pages[source]).all()


# Seen failing without the `settle` in `TcpConnection._read`.
def test_a_copy_ends_only_when_the_device_has_every_byte(rig):
    connection = rig.connect()
    source, destination = scattered(0, NUM_PAGES, 200)  # less than one request
    rig.here.queues["to device"].hold()
    thread = threading.Thread(target=connection.copy, args=(source, destination))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert (rig.memory.pages == CANARY).all()
    rig.here.queues["to device"].release()
    thread.join()
    assert (rig.memory.pages[destination] == rig.source.pages[source]).all()


# Seen failing without the wait in `_Slot.vectors`: bytes are sent before they are fetched, and
# overwritten before they are delivered.
def test_copies_of_many_requests_deliver_the_bytes_of_each(rig):
    connection = rig.connect()
    for seed in range(5):
        source, destination = scattered(seed, NUM_PAGES, NUM_PAGES)
        connection.copy(np.tile(source, 5), np.tile(destination, 5))
        assert (rig.memory.pages[destination] == rig.source.pages[source]).all()
        rig.memory.pages[:] = CANARY


def test_large_pages_in_a_row_are_copied_at_once(make_rig):
    rig = make_rig(9, 1 << 20)
    rig.connect().copy(ALL[2:9], ALL[:7])
    assert (rig.memory.pages[:7] == rig.source.pages[2:]).all()


# Seen failing with the pool's own pages instead of the scratch pages.
def test_a_probe_uses_the_path_of_pages(rig):
    connection = rig.connect()
    before = rig.there.queues["to host"].num_added, rig.here.queues["to device"].num_added
    connection.probe()
    assert rig.there.queues["to host"].num_added > before[0]
    assert rig.here.queues["to device"].num_added > before[1]
    assert (rig.memory.pages == CANARY).all()


# Seen failing without the `settle` in `TcpConnection._read`.
def test_a_rejected_copy_writes_nothing_afterwards(rig):
    connection = rig.connect()
    rig.producer.publications.withdraw(CONSUMER, ALL[500:501])
    for _ in range(5):
        with pytest.raises(ReadRefused, match="page 500 "):
            connection.copy(ALL, ALL)
        rig.memory.pages[:] = CANARY
        threading.Event().wait(0.02)
        assert (rig.memory.pages == CANARY).all()
    connection.copy(ALL[:500], ALL[100:])
    assert (rig.memory.pages[100:] == rig.source.pages[:500]).all()
    assert (rig.memory.pages[:100] == CANARY).all()


# Seen failing with `num_ahead` 0, and without its limit in `_answer_all`.
def test_a_producer_fetches_exactly_one_request_ahead_of_the_socket(make_rig):
    rig = make_rig(4, 32 << 20)  # the sockets hold less than a page, so the producer blocks
    fetched = rig.there.queues["to host"]
    with introduced(rig.producer.admit(CONSUMER)) as raw:
        raw.sendall(
            b"".join(REQUEST.pack(0, 1, 0, 32 << 20) + struct.pack("<i", page) for page in range(4))
        )
        wait_for(lambda: fetched.num_added == 2)
        threading.Event().wait(0.1)
        assert fetched.num_added == 2
        for page in range(4):
            raw.recv(REPLY.size, socket.MSG_WAITALL)
            found = raw.recv(32 << 20, socket.MSG_WAITALL)
            assert found == rig.source.pages[page].tobytes()


# Seen failing if `TcpProducer._serve` does not close the departures.
def test_a_closed_producer_does_not_read_its_pool(make_rig):
    rig = make_rig(4, 32 << 20)
    fetched = rig.there.queues["to host"]
    fetched.hold(after=1)
    with introduced(rig.producer.admit(CONSUMER)) as raw:
        raw.sendall(2 * (REQUEST.pack(0, 1, 0, 32 << 20) + bytes(4)))
        wait_for(lambda: fetched.num_added == 2)  # the first is being sent
    closing = threading.Thread(target=rig.producer.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    fetched.release()
    closing.join()


def test_a_consumer_whose_device_fails_reports_it_and_cannot_promise_the_fence(rig):
    connection = rig.connect()
    rig.here.queues["to device"].fail("an illegal memory access was encountered")
    with pytest.raises(TransferError, match="illegal memory access"):
        connection.copy(ALL, ALL)
    with pytest.raises(EngineFault, match=r"may still write to the pool.*illegal memory access"):
        connection.close()


def test_a_producer_whose_device_fails_reports_it_and_ends_the_connection(rig, caplog):
    connection = rig.connect()
    rig.there.queues["to host"].fail("an illegal memory access was encountered")
    with caplog.at_level(logging.WARNING), pytest.raises(TransferError):
        connection.copy(ALL, ALL)
    wait_for(lambda: "illegal memory access" in caplog.text)


@pytest.mark.parametrize("there, here", [("tcp", "tcp-staged"), ("tcp-staged", "tcp")])
def test_either_end_may_be_a_device_and_the_other_a_host(ends, there, here):
    producer = ends.far_producer(there, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    twin = DeviceTwin()
    backend = staged(twin) if here == "tcp-staged" else TcpBackend("127.0.0.1")
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(backend, producer, memory)
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    connection.copy(source, destination)
    assert (memory.pages[destination] == producer.content[source]).all()
    connection.close()
    twin.end()
