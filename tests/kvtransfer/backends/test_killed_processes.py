"""Failures of processes: the other end survives, detects the failure, and no resource is left."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.errors import TransferError
from kvtransfer.backends.base import TransferBackend
from tests.support.network.data_children import Child, Memory, make_backend, scattered
from tests.support.network.data_ends import Ends, FarConsumer, FarProducer, closing, wait_for
from tests.support.runner.isolation import left_behind

NUM_PAGES, PAGE_BYTES = 256, 65536
NUM_SPARES = 5  # started ahead


@pytest.fixture(params=[3, pytest.param(20, marks=pytest.mark.long)])
def deaths(request: pytest.FixtureRequest) -> int:
    """Return the number of processes to kill."""
    return int(request.param)


@pytest.fixture
def path(far_backend: str) -> TransferBackend:
    return make_backend(far_backend)


def _random_moment() -> None:
    threading.Event().wait(random.uniform(0, 0.02))


def _consumers(ends: Ends, path: TransferBackend, count: int) -> Iterator[FarConsumer]:
    spares: list[FarConsumer] = []
    for number in range(count):
        while len(spares) < min(NUM_SPARES, count - number):
            spares.append(ends.far_consumer(path.name, NUM_PAGES, PAGE_BYTES))
        yield spares.pop(0)


def _producers(ends: Ends, path: TransferBackend, count: int) -> Iterator[FarProducer]:
    spares: list[FarProducer] = []
    for number in range(count):
        while len(spares) < min(NUM_SPARES, count - number):
            spares.append(ends.far_producer(path.name, NUM_PAGES, PAGE_BYTES))
        producer = spares.pop(0)
        producer.publish_all()
        yield producer


@contextmanager
def _leaving_nothing(child: Child, dead: list[Child]) -> Iterator[None]:
    """Check that the process has no more descriptors and shared memory than before, and that the
    machine has none of the killed processes."""
    had, before = _held(child), left_behind()
    yield
    wait_for(lambda: _held(child) == had)
    wait_for(lambda: left_behind() <= before)
    creators = {line.split()[4] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}
    assert creators.isdisjoint(str(one.pid) for one in dead)


def _held(child: Child) -> tuple[int, int]:
    """Return the open descriptors, and the mappings of memory that UCX shares."""
    process = Path(f"/proc/{child.pid}")
    return len(list((process / "fd").iterdir())), (process / "maps").read_text().count("/ucx_shm")


def _serves(ends: Ends, path: TransferBackend, producer: FarProducer) -> None:
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    with closing(path.connect(producer.admit(), producer.remote, memory.pool)) as connection:
        connection.copy(source, destination)
    assert (memory.pages[destination] == producer.content[source]).all()
    assert ends.log.read_text() == ""


FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])


@FROZEN
def test_a_producer_survives_consumers_killed_during_a_read(ends, path, deaths, frozen):
    producer = ends.far_producer(path.name, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    _serves(ends, path, producer)
    dead: list[Child] = []
    with _leaving_nothing(producer.child, dead):
        for consumer in _consumers(ends, path, deaths):
            consumer.read_from(producer)
            if frozen:
                producer.child.freeze()
            _random_moment()
            consumer.child.kill()
            dead.append(consumer.child)
            if frozen:
                producer.child.thaw()
            producer.has_run()
    _serves(ends, path, producer)


@FROZEN
def test_a_consumer_survives_producers_killed_during_a_read(ends, path, deaths, frozen):
    consumer = ends.far_consumer(path.name, NUM_PAGES, PAGE_BYTES)
    dead: list[Child] = []
    with _leaving_nothing(consumer.child, dead):
        for producer in _producers(ends, path, deaths):
            consumer.read_from(producer)
            _random_moment()
            if frozen:
                consumer.child.freeze()
            producer.child.kill()
            dead.append(producer.child)
            if frozen:
                consumer.child.thaw()
            consumer.failed()  # from another message: a read has no deadline of its own
    assert consumer.child.alive
    assert ends.log.read_text() == ""


def test_connecting_to_a_frozen_producer_times_out(ends, path):
    producer = ends.far_producer(path.name, NUM_PAGES, PAGE_BYTES)
    description, memory = producer.admit(), Memory(NUM_PAGES, PAGE_BYTES)
    producer.child.freeze()
    # nixl needs no reply of the producer, and tcp waits for CONNECT_S
    with suppress(TransferError):
        path.connect(description, producer.remote, memory.pool).close()
    producer.child.thaw()
    producer.publish_all()
    ends.connect(path, producer, memory).copy(*scattered(0, NUM_PAGES, NUM_PAGES))
