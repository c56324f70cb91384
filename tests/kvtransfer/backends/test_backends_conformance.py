"""Requirements of every data path. Producers of nixl and tcp are separate processes."""

import contextlib
import threading
import time

import numpy as np
import pytest

from common.copy_map import Slice
from common.errors import EngineFault, LayoutMismatch, TransferError
from kvtransfer.backends.base import PagePool, PoolRegion, ReadMap, ReadRefused
from kvtransfer.backends.nixl import backend as nixl
from kvtransfer.backends.tcp import connection as tcp_connection
from tests.support.network.data_children import CANARY, Memory, scattered
from tests.support.network.data_ends import long_copy, wait_for

NUM_PAGES, PAGE_BYTES = 96, 16384
AT_ONCE_S = 60.0  # on a busy machine


@pytest.fixture
def producer(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    return producer


@pytest.fixture
def memory(ends, backend):
    return ends.memory(backend, NUM_PAGES, PAGE_BYTES)


@pytest.fixture
def connection(ends, backend, producer, memory):
    return ends.connect(backend, producer, memory)


# Sizes of pages that divide no part or request evenly, or cannot be packed, more pages than one
# sendmsg has, pages larger than a part or a request.
@pytest.mark.parametrize(
    "num_pages, page_bytes",
    [(1, 16), (3000, 24), (2500, 1040), (700, 16384), (40, 393216), (3, 5242880)],
)
def test_scattered_pages_are_written_to_their_place_and_no_other_byte_changes(
    ends, backend, num_pages, page_bytes
):
    producer = ends.producer(backend, num_pages, page_bytes)
    producer.publish_all()
    memory = ends.memory(backend, num_pages, page_bytes)
    connection = ends.connect(backend, producer, memory)
    expected = memory.pages.copy()
    for seed in range(3):
        source, destination = scattered(seed, num_pages, max(1, num_pages * (seed + 1) // 4))
        connection.copy(source, destination)
        expected[destination] = producer.content[source]
        assert (memory.pages == expected).all()


SMALL, LARGE = 2 * 1040, 4 * 1040  # bytes of a page at the consumer, and at the producer
HALVES = [
    (Slice(0, 0, 1040, 0, 0, 1040), Slice(0, 0, 3120, 0, 1040, 1024)),
    (Slice(0, 0, 16, 0, 8, 5),),  # of an odd length
    (Slice(0, 2, 0, 0, 1040, 1040), Slice(0, 0, 1040, 2, 0, 1040), Slice(0, 2, 32, 0, 0, 700)),
]


def test_parts_of_pages_are_written_to_mapped_places_and_no_other_byte_changes(ends, backend):
    """Two tables of a producer with pages of other sizes, and a state with another number of
    pages."""
    producer = ends.producer(backend, 2000, LARGE)
    producer.publish_all()
    memory = ends.memory(backend, 1500, SMALL)
    connection = ends.connect(backend, producer, memory, slices=HALVES)
    assert connection.probe() > 0
    expected = memory.pages.copy()
    for table, count in ((0, 1200), (1, 300), (0, 0), (0, 1)):
        source, destination = scattered(table, 1500, count)
        connection.copy(source, destination, table)
        for _, _, start, _, at, size in HALVES[table]:
            expected[destination, at : at + size] = producer.content[source, start : start + size]
        assert (memory.pages == expected).all()
    source, destination = np.array([7, 3, 1999], np.int32), np.array([9, 8, 2, 5], np.int32)
    connection.copy(source, destination, 2)
    for _, there, start, here, at, size in HALVES[2]:
        part = producer.content[source[there], start : start + size]
        expected[destination[here], at : at + size] = part
    assert (memory.pages == expected).all()


@pytest.mark.parametrize("backend", ["nixl", "tcp", "loopback"], indirect=True)
def test_lists_of_pages_that_do_not_fit_the_map_are_rejected(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, LARGE)
    producer.publish_all()
    memory = ends.memory(backend, NUM_PAGES, SMALL)
    connection = ends.connect(backend, producer, memory, slices=HALVES)
    ids = np.arange(4, dtype=np.int32)
    for source, destination, table in ((ids, ids[:3], 0), (ids[:2], ids, 2), (ids, ids[:2], 2)):
        with pytest.raises(EngineFault):
            connection.copy(source, destination, table)
    with pytest.raises(ReadRefused, match=str(NUM_PAGES)):
        connection.copy(np.array([0, 1, NUM_PAGES], np.int32), ids, 2)
    assert (memory.pages == CANARY).all()


@pytest.mark.parametrize(
    "bad",
    [
        Slice(0, 0, LARGE - 15, 0, 0, 16),
        Slice(0, 0, 0, 0, SMALL - 15, 16),
        Slice(0, 0, -1, 0, 0, 16),
        Slice(0, 0, 0, 0, -1, 16),
        Slice(0, -1, 0, 0, 0, 16),
        Slice(0, 0, 0, 0, 0, 0),
        Slice(0, 0, 2**64 - 8, 0, 0, 16),
        Slice(0, 0, 0, 0, 0, SMALL + 1),
    ],
)
def test_parts_outside_a_page_are_rejected(bad):
    local, there = Memory(NUM_PAGES, SMALL), PoolRegion(1 << 40, LARGE, NUM_PAGES)
    with pytest.raises(LayoutMismatch):
        ReadMap(there, local.pool, [[bad], []])
    with pytest.raises(LayoutMismatch):
        ReadMap(there, local.pool, [[], [bad]])


def test_a_copy_of_no_pages_ends_at_once(connection):
    connection.copy(np.empty(0, np.int32), np.empty(0, np.int32))


def test_connections_to_several_producers_copy_at_the_same_time(ends, backend):
    producers = [ends.producer(backend, NUM_PAGES, PAGE_BYTES) for _ in range(2)]
    memories = [ends.memory(backend, NUM_PAGES, PAGE_BYTES) for _ in range(4)]
    pairs = []
    for consumer, memory in enumerate(memories):
        producer = producers[consumer % 2]
        producer.publish_all(consumer)
        pairs.append((producer, memory, ends.connect(backend, producer, memory, consumer)))
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    threads = [
        threading.Thread(
            target=lambda c=connection: [c.copy(source, destination) for _ in range(20)]
        )
        for _, _, connection in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for producer, memory, _ in pairs:
        assert (memory.pages[destination] == producer.content[source]).all()


def test_an_unknown_page_is_refused_and_the_connection_stays_open(producer, memory, connection):
    for wrong in (NUM_PAGES, -1, 2**31 - 1):
        with pytest.raises(ReadRefused, match=str(wrong)):
            connection.copy(np.array([1, wrong], np.int32), np.array([2, 3], np.int32))
    connection.copy(np.array([5], np.int32), np.array([7], np.int32))
    assert (memory.pages[7] == producer.content[5]).all()


def test_pages_of_another_size_are_rejected(ends, backend, producer):
    with pytest.raises(LayoutMismatch, match=r"16384.*32768"):
        ends.connect(backend, producer, ends.memory(backend, NUM_PAGES, 2 * PAGE_BYTES))


@pytest.mark.parametrize(
    "base, num_pages", [(0, 8), (1 << 57, 8), (1 << 40, 0), (1 << 40, 1 << 40), (-8, 8)]
)
def test_invalid_memory_is_rejected(backend, producer, memory, base, num_pages):
    lie = PoolRegion(base, PAGE_BYTES, num_pages)
    with pytest.raises(LayoutMismatch):
        backend.connect(producer.admit(), lie, memory.pool)


def test_an_invalid_description_raises_only_its_error(backend, producer, memory):
    good = producer.admit()
    rng = np.random.default_rng(0)
    for rubbish in (b"", good[:-1], good + b"x", b"\x80", *(rng.bytes(80) for _ in range(50))):
        with pytest.raises(TransferError):
            backend.connect(rubbish, producer.remote, memory.pool)


def test_a_probe_measures_without_changing_a_page(memory, connection):
    assert connection.probe() > 0
    assert (memory.pages == CANARY).all()


def test_a_stopped_connection_copies_no_more(memory, connection):
    connection.stop()
    for _ in range(2):
        with pytest.raises(TransferError):
            connection.copy(np.array([1], np.int32), np.array([2], np.int32))
    with pytest.raises(TransferError):
        connection.probe()
    assert (memory.pages == CANARY).all()
    connection.close()
    connection.stop()
    connection.close()


# Seen failing without the flag in `stop` of nixl and loopback. For tcp's shutdown see test_tcp.py.
def test_stop_ends_a_running_copy(ends, backend):
    num_pages, page_bytes = 64, 1 << 20
    producer = ends.producer(backend, num_pages, page_bytes)
    producer.publish_all()
    memory = ends.memory(backend, num_pages, page_bytes)
    connection = ends.connect(backend, producer, memory)
    with long_copy(connection, memory, num_pages):  # 250 GiB
        connection.stop()


# Seen failing if nixl's `_read` ignores the stop flag, and without the `settle` in
# `TcpConnection.close`.
def test_no_byte_is_written_after_close_at_any_moment(ends, backend, producer, memory):
    description, rng = producer.admit(), np.random.default_rng(0)
    for _ in range(25):
        memory.pages[:] = CANARY
        connection = backend.connect(description, producer.remote, memory.pool)
        thread = threading.Thread(target=_copy_small_parts, args=(connection,))
        thread.start()
        wait_for(lambda: bool((memory.pages != CANARY).any()))
        threading.Event().wait(rng.uniform(0, 0.01))  # the random moment
        connection.stop()
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()
        memory.pages[:] = CANARY
        threading.Event().wait(0.02)
        assert (memory.pages == CANARY).all()


def _copy_small_parts(connection):
    """Copy until stopped, then close, like a link's thread."""
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    with contextlib.suppress(TransferError):
        while True:
            for start in range(0, NUM_PAGES, 4):
                part = slice(start, start + 4)
                connection.copy(source[part], destination[part])
    connection.close()


def test_a_failed_producer_is_reported_as_an_error_at_once(
    backend, monkeypatch, producer, memory, connection
):
    connection.copy(*scattered(0, NUM_PAGES, NUM_PAGES))
    description = producer.admit()
    producer.end()
    for waiting in (nixl, tcp_connection):
        monkeypatch.setattr(waiting, "CONNECT_S", 10 * AT_ONCE_S)
    died_at = time.monotonic()
    with pytest.raises(TransferError):
        connection.copy(*scattered(0, NUM_PAGES, NUM_PAGES))
    with pytest.raises(TransferError):
        backend.connect(description, producer.remote, memory.pool)
    assert time.monotonic() - died_at < AT_ONCE_S


@pytest.mark.parametrize("backend", ["nixl", "tcp", "loopback"], indirect=True)
def test_memory_outside_the_device_is_rejected_with_a_reason(backend, producer):
    pool = Memory(NUM_PAGES, PAGE_BYTES).pool
    elsewhere = PagePool(pool.base, pool.page_bytes, pool.num_pages, "cuda:0")
    with pytest.raises(TransferError, match="cuda:0"):
        backend.serve(elsewhere, 1)
    with pytest.raises(TransferError, match="cuda:0"):
        backend.connect(producer.admit(), producer.remote, elsewhere)
